"""Computes how many FLOPs a picture takes with Qwen-Image-2.1 and with Qwen-Image-Edit.

    python -m benchmarks.picture_flops > benchmarks/results/picture_flops.md

This project's forwards run on the meta device, with the default sizes of diffusers' classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from benchmarks.flop_counter import flops_of
from rl.algorithm.attention_kernels import choose_kernel
from rl.renderers import qwen_image_21_loop
from rl.renderers.qwen_image_config import PATCH_PX
from rl.renderers.qwen_image_denoiser import Denoiser, StepModulation
from rl.renderers.qwen_image_loop import FrameVae, PictureVae

META = torch.device("meta")
GROUP = 8
TEXT_TOKENS = 300
"""Text tokens of a row: instruction and description."""
LEAD_IN = 8
"""Text tokens before a source picture: the start of the user's turn and the picture's marker."""
PX_OF_EDIT_TOKEN, TOKENS_OF_PLUS = 28 * 28, 196
"""A source in the text encoder: px^2 per token (Qwen-Image-Edit); tokens (Plus, of any size)."""


@cache
def _transformer(name: str) -> Any:
    import diffusers

    with META:
        return getattr(diffusers, name)().eval()


@torch.no_grad()
def image_21(side_px: int, num_sources: int, num_steps: int) -> float:
    """FLOPs of one picture of a group of `GROUP` with Qwen-Image-2.1."""
    side = side_px // PATCH_PX
    transformer = _transformer("QwenImage21Transformer2DModel")
    config = transformer.config
    denoiser = qwen_image_21_loop.Denoiser(transformer, choose_kernel("sdpa", "cpu", torch.float32))
    slots = [range(LEAD_IN * i + i - 1, LEAD_IN * i + i) for i in range(1, num_sources + 1)]
    sources = tuple(
        qwen_image_21_loop.PromptImage(
            slot, _empty(side * side, config.in_channels), (side, side), b""
        )
        for slot in slots
    )
    states = _empty((slots[-1].stop if slots else 0) + TEXT_TOKENS, config.context_in_dim)
    group = [qwen_image_21_loop.Row(states, sources)] * GROUP
    prepared: list[Any] = []
    once = flops_of(lambda: prepared.append(denoiser.prepare(group, (side, side))))
    latents = _empty(GROUP, side * side, config.in_channels)
    step = flops_of(lambda: denoiser.velocity(latents, prepared[0], _empty()))
    encoding, decoding = vae_flops(side_px, of_edit=False)
    return (once + num_sources * encoding + num_steps * step) / GROUP + decoding


@torch.no_grad()
def edit(side_px: int, num_source_tokens: int, num_steps: int) -> float:
    """FLOPs of one guided picture of a group of `GROUP` with Qwen-Image-Edit or Plus and one
    source, which has `num_source_tokens` in the text encoder."""
    side = side_px // PATCH_PX
    transformer = _transformer("QwenImageTransformer2DModel")
    config = transformer.config
    width, blocks = config.num_attention_heads * config.attention_head_dim, config.num_layers

    latents = _empty(2, side * side, config.in_channels)
    states = [_empty(TEXT_TOKENS + num_source_tokens, config.joint_attention_dim)] * 2
    denoiser = Denoiser(transformer)
    prepared = denoiser.prepare(states, latents, [(1, side, side)] * 2)
    modulation = _empty(blocks, 1, 6, width)
    table = StepModulation(modulation, modulation, _empty(2, width))
    step = flops_of(lambda: denoiser.velocity(latents, prepared, table))
    encoding, decoding = vae_flops(side_px, of_edit=True)
    return num_steps * step + encoding / GROUP + decoding


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device=META)


@cache
@torch.no_grad()
def vae_flops(side_px: int, *, of_edit: bool) -> tuple[float, float]:
    """FLOPs of (encoding one picture, decoding one picture)."""
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
    """The lines of a Markdown table."""
    num_source_tokens = side_px**2 // PX_OF_EDIT_TOKEN
    rows = {
        "Qwen-Image-Edit, 50 steps, guidance": edit(side_px, num_source_tokens, 50),
        "Qwen-Image-Edit-2511, 40 steps, guidance": edit(side_px, TOKENS_OF_PLUS, 40),
        "Qwen-Image-2.1, 40 steps, text alone": image_21(side_px, 0, 40),
        **{
            f"Qwen-Image-2.1, 40 steps, {number} source{'s' * (number > 1)}": image_21(
                side_px, number, 40
            )
            for number in (1, 3, 10)
        },
    }
    first = next(iter(rows.values()))
    yield f"| {side_px} x {side_px} px | PFLOP a picture | of Edit's |"
    yield "|---|---|---|"
    for name, flops in rows.items():
        yield f"| {name} | {flops / 1e15:.2f} | {flops / first:.3f} |"


if __name__ == "__main__":
    print("# What a picture costs\n\n`python -m benchmarks.picture_flops`: computed, not timed.")
    print(f"A group of {GROUP}; sources as large as the picture; {TEXT_TOKENS} text tokens a row.")
    for side_px in (1024, 512):
        print()
        print("\n".join(table(side_px)))
