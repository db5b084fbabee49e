"""What a picture costs in FLOPs: Qwen-Image-2.1 beside Qwen-Image-Edit.

    python -m benchmarks.picture_flops > benchmarks/results/picture_flops.md

Our own forwards run on the meta device, in the shapes of diffusers' class defaults.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from benchmarks.flop_counter import flops_of
from rl.algorithm.attention_kernels import choose_kernel
from rl.renderers.qwen_image.denoising_config import PATCH_PX
from rl.renderers.qwen_image.modulation import StepModulation
from rl.renderers.qwen_image.qwen_image_denoiser import Denoiser
from rl.renderers.qwen_image.vae2d import FrameVae, PictureVae
from rl.renderers.qwen_image_21 import qwen_image_21_denoiser

META = torch.device("meta")
GROUP = 8
WORDS = 300
"""Tokens of a row's own text: instruction and description."""
LEAD_IN = 8
"""Tokens before a source picture: the turn's start, its mark."""
SEEN_BY_EDIT, SEEN_BY_PLUS = 28 * 28, 196
"""px of a token of Edit's text encoder; tokens of a source in Plus's, whatever its size."""
PETA = 1e15


@cache
def _transformer(name: str) -> Any:
    import diffusers

    with META:
        return getattr(diffusers, name)().eval()


@torch.no_grad()
def image_21(side_px: int, num_sources: int, num_steps: int) -> float:
    """FLOPs of a picture in a group of `GROUP`."""
    side = side_px // PATCH_PX
    transformer = _transformer("QwenImage21Transformer2DModel")
    config = transformer.config
    denoiser = qwen_image_21_denoiser.Denoiser(
        transformer, choose_kernel("sdpa", "cpu", torch.float32)
    )
    places = [range(LEAD_IN * i + i - 1, LEAD_IN * i + i) for i in range(1, num_sources + 1)]
    shown = tuple(
        qwen_image_21_denoiser.Shown(
            place, _empty(side * side, config.in_channels), (side, side), b""
        )
        for place in places
    )
    states = _empty((places[-1].stop if places else 0) + WORDS, config.context_in_dim)
    group = [qwen_image_21_denoiser.Row(states, shown)] * GROUP
    given: list[Any] = []
    once = flops_of(lambda: given.append(denoiser.prepare([group], (side, side))))
    latents = _empty(GROUP, side * side, config.in_channels)
    step = flops_of(lambda: denoiser.velocity(latents, given[0], _empty()))
    encoding, decoding = vae_flops(side_px, of_edit=False)
    return (once + num_sources * encoding + num_steps * step) / GROUP + decoding


@torch.no_grad()
def edit(side_px: int, num_seen: int, num_steps: int, guided: bool) -> float:
    """The same of Edit or Plus with one source, of which the text holds `num_seen` tokens."""
    side = side_px // PATCH_PX
    transformer = _transformer("QwenImageTransformer2DModel")
    config = transformer.config
    width, blocks = config.num_attention_heads * config.attention_head_dim, config.num_layers

    num_rows = 2 if guided else 1
    latents = _empty(num_rows, side * side, config.in_channels)
    states = [_empty(WORDS + num_seen, config.joint_attention_dim)] * num_rows
    denoiser = Denoiser(transformer)
    given = denoiser.prepare(states, latents, [(1, side, side)] * 2)
    modulation = _empty(blocks, 1, 6, width)
    table = StepModulation(modulation, modulation, _empty(2, width))
    step = flops_of(lambda: denoiser.velocity(latents, given, table))
    encoding, decoding = vae_flops(side_px, of_edit=True)
    return num_steps * step + encoding / GROUP + decoding


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device=META)


@cache
@torch.no_grad()
def vae_flops(side_px: int, *, of_edit: bool) -> tuple[float, float]:
    """(of encoding one picture, of decoding one)."""
    from diffusers import AutoencoderKLQwenImage, AutoencoderKLQwenImage21

    with META:
        vae: Any = (
            FrameVae(AutoencoderKLQwenImage())
            if of_edit
            else PictureVae(AutoencoderKLQwenImage21())
        )
    channels = 3 if of_edit else 4
    latents: list[torch.Tensor] = []
    pixels = _empty(1, channels, side_px, side_px)
    encoding = flops_of(lambda: latents.append(vae.encode(pixels)))
    return encoding, flops_of(lambda: vae.decode(latents[0]))


def table(side_px: int) -> Iterator[str]:
    """Markdown."""
    seen = side_px**2 // SEEN_BY_EDIT
    rows = {
        "Qwen-Image-Edit, 50 steps, guidance": edit(side_px, seen, 50, True),
        "Qwen-Image-Edit-2511, 40 steps, guidance": edit(side_px, SEEN_BY_PLUS, 40, True),
        "Qwen-Image-Edit, 8 steps, none": edit(side_px, seen, 8, False),
        "Qwen-Image-2.1, 40 steps, text alone": image_21(side_px, 0, 40),
        **{
            f"Qwen-Image-2.1, 40 steps, {number} source{'s' * (number > 1)}": image_21(
                side_px, number, 40
            )
            for number in (1, 3, 10)
        },
        "Qwen-Image-2.1, 8 steps, 1 source": image_21(side_px, 1, 8),
    }
    first = next(iter(rows.values()))
    yield f"| {side_px} x {side_px} px | PFLOP a picture | of Edit's |"
    yield "|---|---|---|"
    for name, flops in rows.items():
        yield f"| {name} | {flops / PETA:.2f} | {flops / first:.3f} |"


if __name__ == "__main__":
    print("# What a picture costs\n\n`python -m benchmarks.picture_flops`: computed, not timed.")
    print(f"A group of {GROUP}; sources as large as the picture; {WORDS} tokens of text a row.")
    for side_px in (1024, 512):
        print()
        print("\n".join(table(side_px)))
