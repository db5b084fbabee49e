"""Steps of `rl check-gpu`: times of attention kernels at new lengths, and of a compiled block."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rl.check_gpu.gpu_kernels import relative_error
from rl.check_gpu.lines import Asked, Line, result, skipped
from rl.renderers.qwen_image.qwen_image_denoiser import (
    after_attention,
    attention,
    before_attention,
    streams_of,
)

NUM_TOKENS, MODEL_SIZE = 4096, dict[str, Any]()
"""Tokens of 1024 x 1024 px; arguments of the released transformer, which are its defaults."""

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "PyTorch's choice": None,
}


def timed_ms(device: str, call: Callable[[], object]) -> float:
    """Wall time of the call; waits for the device before and after it."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    start_s = time.perf_counter()
    call()
    wait()
    return 1e3 * (time.perf_counter() - start_s)


@torch.no_grad()
def backends(asked: Asked) -> Iterator[Line]:
    """Times attention on rows as in the Edit renderer, each of a new length: a kernel that prepares
    a plan for each length is slow here, although it is fast when lengths repeat."""
    tokens, heads, width = (64, 2, 16) if asked.tiny else (8192, 24, 128)
    medians: dict[str, float] = {}
    for name, backend in BACKENDS.items():
        what = f"attention by {name}"
        if asked.tiny and name in ("cudnn", "efficient"):
            yield skipped(what)
            continue
        chosen: Any = sdpa_kernel(backend) if backend is not None else nullcontext()
        times = []
        try:
            with chosen:
                for length in range(tokens, tokens + 13 * 9, 13):
                    row = torch.randn(3, 1, length, heads, width, device=asked.device)
                    row = row.to(getattr(torch, asked.dtype))
                    call = partial(attention, *row)
                    times.append(timed_ms(asked.device, call))
        except RuntimeError as error:
            yield skipped(what, f"does not run here: {str(error).split('.')[0][:99]}")
            continue
        medians[name] = statistics.median(times[1:])
        note = f"median {medians[name]:.2g} ms, slowest new length {max(times[1:]):.2g} ms"
        yield result(what, True, note)
    yield result("fastest attention", True, min(medians, key=medians.__getitem__))


@torch.no_grad()
def compiled_block(asked: Asked) -> Iterator[Line]:
    """Times the image tokens' half of a block of the released editor, eager and compiled, at new
    lengths. A run does not compile blocks."""
    from rl.check_gpu.gpu_renderers import LARGEST_ERROR, small_parts

    kind = type(small_parts(asked, "quickstart").transformer)
    with torch.device(asked.device):
        transformer = kind(num_layers=1, **MODEL_SIZE).to(getattr(torch, asked.dtype))
    stream, _ = streams_of(transformer.transformer_blocks[0])
    like, head_dim = transformer.img_in.weight, transformer.config.attention_head_dim

    def block(tokens: torch.Tensor, modulation: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        size = tokens.shape[1]
        heads = before_attention(stream, tokens, modulation, rotary, size, size)
        return after_attention(stream, tokens, modulation, attention(*heads).flatten(2), size)

    inputs = [
        (
            torch.randn(1, size, len(like)).to(like),
            1 + 0.1 * torch.randn(1, 6, len(like)).to(like),
            torch.randn(size, 1, head_dim // 2, 2).to(like.device),
        )
        for size in range(NUM_TOKENS, NUM_TOKENS + 16 * 6, 16)
    ]
    outcomes, times = [], []
    for function in (block, torch.compile(block, dynamic=True)):
        times.append([timed_ms(asked.device, partial(function, *one)) for one in inputs])
        outcomes.append(function(*inputs[-1]))
    error = relative_error(outcomes[1], outcomes[0])
    eager_ms, compiled_ms = (statistics.median(each[1:]) for each in times)
    note = f"{compiled_ms:.3g} ms, eager {eager_ms:.3g}; {times[1][0] / 1e3:.0f} s to compile"
    fix = "nothing: a run compiles no block; report it with an issue"
    yield result("compiled block", error <= LARGEST_ERROR[asked.dtype], note, fix)
