"""Cases `ceilings`, `attention`, `dit`, `vae`: diffusers' and this project's forwards, in turn.

Axes: B rows, N tokens of a picture and as many of its source, L text tokens, D their width.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.flop_counter import flops_of
from benchmarks.gpu_models import open_bench, random_transformer, random_vae
from benchmarks.gpu_timing import Bench
from benchmarks.stock import StockDenoiser, StockVae
from rl.renderers.qwen_image_config import PATCH_PX
from rl.renderers.qwen_image_denoiser import Denoiser, StepModulation, attention, build_table
from rl.renderers.qwen_image_loop import FrameVae
from rl.tools.gpu_checks import Line, Setup, measured, result, skipped
from rl.tools.gpu_steps import relative_error

NUM_STEPS = 8
TIMESTEP = 1000.0
"""Timestep of the first step, which is the one timed."""
LARGEST_DIFFERENCE = {"bfloat16": 0.1, "float32": 1e-4}
"""Limit on the relative difference of the two implementations, for the rounding of sixty layers.
Wrong weights cause about 1."""
SECONDS = 15.0
"""Time for the rounds of a case, models and compilation not counted."""
PRODUCTS = ((8192, 8192, 8192), (2048, 3072, 12288), (4096, 3584, 3584), (9488, 3072, 3072))
"""(rows, inner size, columns): a large one, then those of the editor and the policy."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "PyTorch's choice": None,
}


@torch.no_grad()
def ceilings(setup: Setup) -> Iterator[Line]:
    """Matrix products and copies: everything else is compared with them."""
    bench = open_bench(setup)
    dtype = getattr(torch, bench.dtype)
    for rows, inner, columns in [(256, 256, 256)] if setup.tiny else PRODUCTS:
        x = torch.randn(rows, inner, device=bench.device).to(dtype)
        w = torch.randn(columns, inner, device=bench.device).to(dtype)
        timing = bench.time({"": partial(torch.mm, x, w.T)}, 1.0)[""]
        tflops = 2e-9 * rows * inner * columns / timing.ms
        what = f"product {rows} x {inner} x {columns}, {bench.dtype}"
        yield measured(what, f"{tflops:.0f} TFLOP/s", tflops=tflops, ms=timing.ms)
    target = torch.empty(2**20 if setup.tiny else 2**31, dtype=torch.uint8, device=bench.device)
    sources = {"copy on the device": (torch.empty_like(target), 2)}  # read and written
    host = torch.empty(target.shape, dtype=torch.uint8)
    sources["copy from the host"] = (host, 1)
    if not setup.tiny:
        sources["copy from pinned memory"] = (host.pin_memory(), 1)
    for what, (source, times) in sources.items():
        timing = bench.time({what: partial(target.copy_, source)}, 1.0)[what]
        rate = 1e-6 * times * target.nbytes / timing.ms
        yield measured(what, f"{rate:.4g} GB/s", gb_per_s=rate, ms=timing.ms)


@torch.no_grad()
def attention_backends(setup: Setup) -> Iterator[Line]:
    """Times attention on rows as in the Edit renderer, each of a new length: a kernel that prepares
    a plan for each length is slow here, although it is fast when lengths repeat."""
    bench = open_bench(setup)
    tokens, heads, width = (64, 2, 16) if setup.tiny else (8192, 24, 128)
    for name, backend in BACKENDS.items():
        what = f"attention by {name}"
        chosen: Any = sdpa_kernel(backend) if backend is not None else nullcontext()
        times_s = []
        try:
            with chosen:
                for length in range(tokens, tokens + 13 * 9, 13):
                    row = torch.randn(3, 1, length, heads, width, device=bench.device)
                    row = row.to(getattr(torch, bench.dtype))
                    times_s.append(bench.timed_s(partial(attention, *row)))
        except RuntimeError as error:
            yield skipped(what, f"does not run here: {str(error).split('.')[0][:99]}")
            continue
        new_ms = [1e3 * seconds for seconds in times_s[1:]]
        median_ms, slowest_ms = statistics.median(new_ms), max(new_ms)
        note = f"median {median_ms:.2g} ms, slowest new length {slowest_ms:.2g} ms"
        yield measured(what, note, ms=median_ms, slowest_ms=slowest_ms)


def make_forwards(
    bench: Bench,
    transformer: Any,
    modulation: StepModulation,
    side_px: int,
    text_lens: Sequence[int],
) -> tuple[str, Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """(name, ours, diffusers'): calls that compute a denoising step on random inputs, without their
    preparation. `text_lens`: text tokens of each row."""
    config, dtype = transformer.config, getattr(torch, bench.dtype)
    side, batch = side_px // PATCH_PX, len(text_lens)
    generator = torch.Generator(bench.device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=bench.device).to(dtype)

    latents, sources = (random(batch, side * side, config.in_channels) for _ in range(2))
    states = [random(length, config.joint_attention_dim) for length in text_lens]
    denoiser, stock, shapes = (
        Denoiser(transformer),
        StockDenoiser(transformer),
        [(1, side, side)] * 2,
    )
    prepared = denoiser.prepare(states, sources, shapes)
    stocked = stock.prepare(states, sources, shapes)
    lengths = "" if len(set(text_lens)) == 1 else " of different lengths"
    return (
        f"DiT {side_px}^2 x {batch}{lengths}",
        lambda: denoiser.velocity(latents, prepared, modulation),
        lambda: stock.velocity(latents, stocked, latents.new_full((), TIMESTEP)),
    )


def shapes_of(bench: Bench) -> list[tuple[int, list[int]]]:
    """(side px, text tokens of each row): those of `Size.render`, and the last one again with
    completions of different lengths."""
    size = bench.size
    equal_lens = [(px, [size.num_conditioning_tokens(px)] * batch) for px, batch in size.render]
    px, batch = size.render[-1]
    longest, step = size.num_conditioning_tokens(px), size.completion_tokens // batch
    return [*equal_lens, (px, [longest - step * row for row in range(batch)])]


@torch.no_grad()
def dit(setup: Setup) -> Iterator[Line]:
    """The editor's transformer: a denoising step."""
    bench = open_bench(setup)
    transformer = random_transformer(bench)
    timesteps = torch.linspace(TIMESTEP, TIMESTEP / NUM_STEPS, NUM_STEPS)
    modulation = build_table(transformer, timesteps)[0].to(transformer.device)
    shapes = shapes_of(bench)
    for side_px, text_lens in shapes:
        forwards = make_forwards(bench, transformer, modulation, side_px, text_lens)
        yield from _compared(bench, *forwards, SECONDS / len(shapes))


@torch.no_grad()
def vae(setup: Setup) -> Iterator[Line]:
    """The editor's VAE: encoding and decoding of one picture."""
    bench = open_bench(setup)
    stock_vae, copy = random_vae(bench), random_vae(bench)
    copy.load_state_dict(stock_vae.state_dict())
    stock, ours = StockVae(stock_vae), FrameVae(copy).eval()
    for side_px in bench.size.vae_px:
        latent_px = side_px // 8
        pixels = torch.rand(1, 3, side_px, side_px) * 2 - 1
        latents = torch.randn(1, ours.mean.shape[1], latent_px, latent_px)
        for name, given in (("encode", pixels), ("decode", latents)):
            given = given.to(bench.device, getattr(torch, bench.dtype))
            our_call = partial(getattr(ours, name), given)
            stock_call = partial(getattr(stock, name), given)
            seconds = SECONDS / 4 / len(bench.size.vae_px)
            yield from _compared(bench, f"VAE {name} {side_px}^2", our_call, stock_call, seconds)


def _compared(
    bench: Bench,
    name: str,
    ours: Callable[[], torch.Tensor],
    stock: Callable[[], torch.Tensor],
    seconds: float,
) -> Iterator[Line]:
    """Whether ours gives what diffusers' gives, and the times of both."""
    error = relative_error(ours(), stock())
    limit = LARGEST_DIFFERENCE[bench.dtype]
    note = f"relative difference {error:.1e}, limit {limit:g}"
    yield result(f"{name}, ours against diffusers", error <= limit, note, "report it with an issue")
    timings = bench.time({"diffusers": stock, "ours": ours}, seconds)
    flops = flops_of(ours)
    yield bench.line(f"{name}, diffusers", timings["diffusers"], flops)
    yield bench.line(f"{name}, ours", timings["ours"], flops, timings["diffusers"])
