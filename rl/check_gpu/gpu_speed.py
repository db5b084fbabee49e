"""Step 2, timed: PyTorch's attention backends at sequence lengths that are new in every round, and
one block of the Edit transformer, compiled and not."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rl.check_gpu.gpu_kernels import LARGEST_ERROR, relative_error
from rl.check_gpu.lines import NEEDS_CUDA, Asked, Line, failed, ok, skipped
from rl.renderers.qwen_image.qwen_image_denoiser import (
    after_attention,
    attention,
    before_attention,
    streams_of,
)

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
NUM_ROUNDS = 8
TOKENS, HEADS, WIDTH = 4096, 24, 128
"""Of the Edit transformer: a picture of 1024 x 1024 px, its attention heads, their width."""
TINY_TOKENS, TINY_HEADS, TINY_WIDTH = 64, 2, 16


def timed_ms(device: str, call: Callable[[], object]) -> float:
    """Wall time, the device idle before and after."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    call()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start_s)


@torch.no_grad()
def attention_backends(asked: Asked) -> Iterator[Line]:
    """A kernel that plans each new length is slow here, and fast in a loop over one length."""
    tokens, heads, width = (TOKENS, HEADS, WIDTH)
    if asked.tiny:
        tokens, heads, width = (TINY_TOKENS, TINY_HEADS, TINY_WIDTH)
    medians: dict[str, float] = {}
    for name, backend in {**BACKENDS, "PyTorch's choice": None}.items():
        what = f"attention backend {name}"
        if asked.tiny and name in ("cudnn", "efficient"):
            yield skipped(what, NEEDS_CUDA)
            continue
        try:
            times = [_attend_ms(asked, backend, tokens + 13 * r, heads, width) for r in range(9)]
        except RuntimeError as error:
            yield skipped(what, f"does not run here: {str(error).split('.')[0][:120]}")
            continue
        medians[name] = statistics.median(times[1:])
        yield ok(what, f"{medians[name]:.3g} ms, slowest new length {max(times[1:]):.3g} ms")
    if len(medians) > 1:
        best = min(medians, key=medians.__getitem__)
        yield ok("fastest attention at new lengths", best)


def _attend_ms(asked: Asked, backend: Any, tokens: int, heads: int, width: int) -> float:
    dtype = getattr(torch, asked.dtype)
    q, k, v = (
        torch.randn(1, tokens, heads, width, device=asked.device, dtype=dtype) for _ in "qkv"
    )
    call: Callable[[], torch.Tensor] = partial(attention, q, k, v)
    if backend is None:
        return timed_ms(asked.device, call)
    with sdpa_kernel(backend):
        return timed_ms(asked.device, call)


@torch.no_grad()
def compiled_block(asked: Asked) -> Iterator[Line]:
    """Correct, and how much faster: a run compiles no block, so this only tells what the compiler
    of this machine does."""
    from rl.check_gpu.gpu_renderers import load_renderer

    transformer: Any = load_renderer(asked, "quickstart").parts.transformer
    if not asked.tiny:  # one block of the released editor's size, random
        with torch.device(asked.device):
            transformer = type(transformer)(num_layers=1).to(torch.bfloat16)
    stream, _ = streams_of(transformer.transformer_blocks[0])
    width = transformer.config.attention_head_dim
    num_tokens = TINY_TOKENS if asked.tiny else TOKENS

    def block(tokens: torch.Tensor, modulation: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        size = tokens.shape[1]
        heads = before_attention(stream, tokens, modulation, rotary, size, size)
        return after_attention(stream, tokens, modulation, attention(*heads).flatten(2), size)

    def inputs(size: int) -> tuple[torch.Tensor, ...]:
        like = transformer.img_in.weight
        tokens = torch.randn(1, size, like.shape[0]).to(like)
        modulation = 1 + 0.1 * torch.randn(1, 6, like.shape[0]).to(like)
        angles = torch.arange(size)[:, None, None] * torch.linspace(0, 1, width // 2)
        rotary = torch.stack([angles.cos(), angles.sin()], dim=-1).to(like.device)
        return tokens, modulation, rotary

    made = [inputs(num_tokens + 16 * r) for r in range(NUM_ROUNDS)]
    eager_ms = [timed_ms(asked.device, partial(block, *one)) for one in made]
    yield ok("transformer block, eager", f"{statistics.median(eager_ms):.3g} ms")
    what = "transformer block, compiled"
    if asked.tiny:
        yield skipped(what, f"{NEEDS_CUDA}; --tiny is eager")
        return
    compiled = torch.compile(block, dynamic=True, fullgraph=True)
    first_s = timed_ms(asked.device, partial(compiled, *made[0])) / 1e3
    compiled_ms = [timed_ms(asked.device, partial(compiled, *one)) for one in made]
    error = relative_error(compiled(*made[-1]), block(*made[-1]))
    limit = LARGEST_ERROR[asked.dtype]
    note = f"{statistics.median(compiled_ms):.3g} ms, {first_s:.0f} s to compile"
    note += f", differs by {error:.1e} of {limit:g}"
    if error <= limit:
        yield ok(what, note)
    else:
        fix = "set engine.enforce_eager=true, which compiles nothing"
        yield failed(what, note, fix, engine__enforce_eager="true")
