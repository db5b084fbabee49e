"""Measures transformer forwards and the VAE at real size: diffusers' and this project's, in turn.

rl bench-gpu --items 2,3

Axes: B rows, N tokens of a picture and as many of its source, L text tokens, D their width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.flop_counter import flops_of
from benchmarks.gpu_bench import Bench, cleared, timed_s
from benchmarks.gpu_models import modulation_to_host, random_transformer, random_vae
from benchmarks.stock import StockDenoiser, StockVae
from rl.check_gpu.gpu_kernels import relative_error
from rl.renderers.qwen_image.denoising_config import PATCH_PX
from rl.renderers.qwen_image.modulation import StepModulation, build_table
from rl.renderers.qwen_image.qwen_image_denoiser import Denoiser
from rl.renderers.qwen_image.vae2d import FrameVae

NUM_STEPS = 8
TIMESTEP = 1000.0
"""Timestep of the first step, which is the one timed."""
LARGEST_DIFFERENCE = {"bfloat16": 0.1, "float32": 1e-4}
"""Limit on the relative difference of the two implementations, for the rounding of sixty layers.
Wrong weights cause about 1."""


@dataclass(frozen=True, eq=False)
class Forward:
    """Inputs of one denoising step, for either implementation."""

    name: str
    side_px: int
    latents: torch.Tensor
    """[B, N, 64]."""
    sources: torch.Tensor
    """[B, N, 64]."""
    states: list[torch.Tensor]
    """For each row [L, D]; L may differ."""

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(1, height, width) of picture and source in patches."""
        return [(1, self.side_px // PATCH_PX, self.side_px // PATCH_PX)] * 2

    def stock(self, transformer: Any) -> Callable[[], torch.Tensor]:
        """A call that computes the step with diffusers' forward."""
        stock, timestep = StockDenoiser(transformer), self.latents.new_full((), TIMESTEP)
        prepared = stock.prepare(self.states, self.sources, self.shapes)
        return lambda: stock.velocity(self.latents, prepared, timestep)

    def flops(self, transformer: Any, modulation: StepModulation) -> int:
        """FLOPs of the step with this project's denoiser."""
        return flops_of(self.ours(Denoiser(transformer), modulation))

    def ours(self, denoiser: Denoiser, modulation: StepModulation) -> Callable[[], torch.Tensor]:
        """A call that computes the step with this project's denoiser, after its preparation."""
        prepared = denoiser.prepare(self.states, self.sources, self.shapes)
        return lambda: denoiser.velocity(self.latents, prepared, modulation)


def make_forward(bench: Bench, transformer: Any, side_px: int, text_lens: Sequence[int]) -> Forward:
    """Random inputs. `text_lens`: text tokens of each row."""
    config, dtype = transformer.config, getattr(torch, bench.dtype)
    batch, num_tokens = len(text_lens), (side_px // PATCH_PX) ** 2
    generator = torch.Generator(bench.device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=bench.device).to(dtype)

    lengths = "" if len(set(text_lens)) == 1 else " of different lengths"
    return Forward(
        f"DiT {side_px}^2 x {batch}{lengths}",
        side_px,
        random(batch, num_tokens, config.in_channels),
        random(batch, num_tokens, config.in_channels),
        [random(length, config.joint_attention_dim) for length in text_lens],
    )


def cases(bench: Bench) -> list[tuple[int, list[int]]]:
    """(side px, text tokens of each row): those of `Size.render`, and the last one again with
    completions of different lengths."""
    size = bench.size
    equal = [(px, [size.num_conditioning_tokens(px)] * batch) for px, batch in size.render]
    px, batch = size.render[-1]
    longest, step = size.num_conditioning_tokens(px), size.completion_tokens // batch
    return [*equal, (px, [longest - step * row for row in range(batch)])]


@torch.no_grad()
def transformer_forwards(bench: Bench) -> None:
    """Compares and times the forwards, then moves the modulation weights to the host."""
    with cleared(bench.device):
        transformer = random_transformer(bench)
        modulation = _modulation(transformer)
        _against_stock(bench, transformer, modulation)
        _move_modulation(bench, transformer)
        del transformer, modulation


def _modulation(transformer: Any) -> StepModulation:
    """The modulation of the first step."""
    timesteps = torch.linspace(TIMESTEP, TIMESTEP / NUM_STEPS, NUM_STEPS)
    return build_table(transformer, timesteps)[0].to(transformer.device)


def _against_stock(bench: Bench, transformer: Any, modulation: StepModulation) -> None:
    denoiser = Denoiser(transformer)
    all_cases = cases(bench)
    for side_px, text_lens in all_cases:
        forward = make_forward(bench, transformer, side_px, text_lens)
        calls = {
            "diffusers": forward.stock(transformer),
            "ours": forward.ours(denoiser, modulation),
        }
        _check_equal(bench, forward.name, calls["diffusers"], calls["ours"])
        timings = bench.time(calls, share=0.6 / len(all_cases))
        flops, stock = forward.flops(transformer, modulation), timings.get("diffusers")
        for name, timing in timings.items():
            peer = None if name == "diffusers" else stock
            bench.log_time(f"{forward.name}, {name}", timing, flops, peer)
        if "ours" in timings and "different" not in forward.name:
            _goal(bench, forward, flops, timings["ours"].ms)


def _goal(bench: Bench, forward: Forward, flops: float, ours_ms: float) -> None:
    share = bench.floor_ms(flops) / ours_ms
    wanted = 0.78 if forward.side_px >= 1024 else 0.65
    if forward.side_px >= 1024 or len(forward.states) >= 4:
        bench.report.at_least(f"{forward.name}, share of the matmul rate", wanted, share)


def _check_equal(
    bench: Bench, name: str, stock: Callable[[], torch.Tensor], ours: Callable[[], torch.Tensor]
) -> None:
    """Fails the benchmark if the implementations differ on the same weights and inputs."""
    error = relative_error(ours(), stock())
    if not error <= LARGEST_DIFFERENCE[bench.dtype]:
        bench.report.fail(f"{name}: ours differs from diffusers' by {error:.2g} of its size")
    bench.log(f"{name}, ours against diffusers", note=f"differs by {error:.1e}")


def _move_modulation(bench: Bench, transformer: Any) -> None:
    """Moves the modulation weights to host memory, and times building a schedule's table there."""
    total_gb = _resident_gb(transformer, bench.device)
    modulation_to_host(transformer)
    kept_gb = _resident_gb(transformer, bench.device)
    note = f"{total_gb:.1f} GB of weights on the device without it"
    bench.log("modulation as a table", peak_gb=kept_gb, note=note)
    if bench.device.startswith("cuda"):
        bench.report.at_most("transformer's weights on the device", 27.4, kept_gb, "GB")
    table_s = timed_s(bench.device, lambda: _modulation(transformer))
    note = f"{NUM_STEPS} steps, once per schedule, weights from host memory"
    bench.log("modulation table", 1e3 * table_s, note=note)


def _resident_gb(module: torch.nn.Module, device: str) -> float:
    kind = torch.device(device).type
    return sum(p.nbytes for p in module.parameters() if p.device.type == kind) / 1e9


@torch.no_grad()
def vae(bench: Bench) -> None:
    """Compares and times encoding and decoding of one picture."""
    with cleared(bench.device):
        stock = random_vae(bench)
        copy = random_vae(bench)
        copy.load_state_dict(stock.state_dict())
        for side_px in bench.size.vae_px:
            _vae_at(bench, StockVae(stock), FrameVae(copy).eval(), side_px)


def _vae_at(bench: Bench, stock: StockVae, ours: FrameVae, side_px: int) -> None:
    dtype = getattr(torch, bench.dtype)
    pixels = torch.rand(1, 3, side_px, side_px, device=bench.device) * 2 - 1
    latents = torch.randn(1, ours.mean.shape[1], side_px // 8, side_px // 8, device=bench.device)
    pixels, latents = pixels.to(dtype), latents.to(dtype)
    limits_ms = {"encode": 10.0, "decode": 12.0}
    for name, call_stock, call_ours in (
        ("encode", lambda: stock.encode(pixels), lambda: ours.encode(pixels)),
        ("decode", lambda: stock.decode(latents), lambda: ours.decode(latents)),
    ):
        title = f"VAE {name} {side_px}^2"
        _check_equal(bench, title, call_stock, call_ours)
        share = 1 / (2 * len(bench.size.vae_px))
        timings = bench.time({"diffusers": call_stock, "ours": call_ours}, share)
        flops, peer = flops_of(call_ours), timings.get("diffusers")
        if peer is not None:
            bench.log_time(f"{title}, diffusers", peer, flops)
        if "ours" in timings:
            bench.log_time(f"{title}, ours", timings["ours"], flops, peer)
            if side_px == 1024:
                bench.report.at_most(title, limits_ms[name], timings["ours"].ms, "ms")
