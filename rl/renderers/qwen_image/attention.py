"""Chooses diffusers' attention kernel for the editor's transformer."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch

from rl.renderers.qwen_image.qwen_image_denoiser import Attention

logger = logging.getLogger(__name__)

CANDIDATES = ("native", "_native_cudnn", "_native_flash", "flash", "_flash_3")
"""What 'auto' times on a GPU: exact kernels (sage attention quantizes), none that is downloaded."""

NUM_WARM_UP, NUM_TIMED = 3, 10

TimeCall = Callable[[Callable[[], object]], float]
"""Milliseconds of one call."""


def attention_of(backend: str, device: torch.device) -> Attention:
    """Raises ValueError for a backend that is unknown or not usable here; 'auto' leaves those out
    and measures the others when it first sees how large the work is."""
    if backend != "auto":
        try:
            return _dispatch_to(backend)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"renderer.attention_backend: {backend!r}: {error}") from error
    if device.type != "cuda":
        return _dispatch_to("native")
    return FastestAttention(CANDIDATES, functools.partial(_cuda_ms, device))


class FastestAttention:
    """Times the candidates on its first arguments and stays with the fastest."""

    def __init__(self, candidates: Sequence[str], time_call: TimeCall) -> None:
        self._candidates = candidates
        self._time_call = time_call
        self._chosen: Attention | None = None

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        if self._chosen is None:
            self._chosen = self._choose(queries, keys, values)
        return self._chosen(queries, keys, values)

    def _choose(self, *heads: torch.Tensor) -> Attention:
        times_ms, found = {}, {}
        for backend in self._candidates:
            try:
                attention = _dispatch_to(backend)
                times_ms[backend] = self._time_call(functools.partial(attention, *heads))
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception as error:  # a kernel says in its own way that it cannot
                logger.info("attention backend %s is left out: %s", backend, error)
            else:
                found[backend] = attention
        if not found:
            raise RuntimeError("renderer.attention_backend: none works; name one to see why")
        best = min(times_ms, key=times_ms.__getitem__)
        timings = ", ".join(f"{backend} {ms:.3f} ms" for backend, ms in times_ms.items())
        logger.info(
            "renderer.attention_backend: %r for queries of %s (%s); name it in the config for "
            "pictures that repeat bit for bit in another process",
            *(best, list(heads[0].shape), timings),
        )
        return found[best]


def _dispatch_to(backend: str) -> Attention:
    """Raises ValueError for a name diffusers does not know, RuntimeError for what is missing."""
    from diffusers.models import attention_dispatch

    # The context checks that the backend is usable, and fetches the kernel of one on the hub.
    with attention_dispatch.attention_backend(backend):
        name = attention_dispatch.AttentionBackendName(backend)
    return functools.partial(attention_dispatch.dispatch_attention_fn, backend=name)


def _cuda_ms(device: torch.device, call: Callable[[], object]) -> float:
    """Events are of the current device's stream, so the kernels' own is made current."""
    with torch.cuda.device(device):
        for _ in range(NUM_WARM_UP):
            call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(NUM_TIMED):
            call()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / NUM_TIMED
