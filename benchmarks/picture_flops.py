"""What a picture costs in FLOPs: Qwen-Image-2.1 beside Qwen-Image-Edit, as this project computes
them.

    python -m benchmarks.picture_flops > benchmarks/results/picture_flops.md

From the shapes of the released models (2.1's are diffusers' class defaults, not read from a
checkpoint), by the formulas that a run's own counter adds up; the VAEs are counted operation by
operation on the meta device. Matrix products, convolutions and attention alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from rl.meter.flop_count import FlopCount
from rl.renderers.qwen_image.config import PATCH_PX
from rl.renderers.qwen_image.vae2d import FrameVae
from rl.renderers.qwen_image_21.cost import Sizes, preparing_work, step_work
from rl.renderers.qwen_image_21.layout import Piece
from rl.renderers.qwen_image_21.vae import PictureVae
from rl.renderers.shared.cost import denoising_work

IMAGE_21 = SimpleNamespace(
    num_layers=32,
    num_attention_heads=32,
    attention_head_dim=128,
    mlp_ratio=3,
    context_in_dim=4096,
    in_channels=64,
    out_channels=64,
)
EDIT = SimpleNamespace(
    num_layers=60,
    num_attention_heads=24,
    attention_head_dim=128,
    patch_size=2,
    in_channels=64,
    out_channels=16,
)
GROUP = 8
WORDS = 300
"""Tokens of a row's own text: instruction and description."""
LEAD_IN = 8
"""Tokens before a source picture: the turn's start, its mark."""
SEEN_BY_EDIT, SEEN_BY_PLUS = 28 * 28, 196
"""px of a token of Edit's text encoder; tokens of a source in Plus's, whatever its size."""
PETA = 1e15


def image_21(side_px: int, num_sources: int, num_steps: int) -> float:
    """FLOPs of a picture in a group of `GROUP`."""
    shape = (side_px // PATCH_PX, side_px // PATCH_PX)
    pieces: list[Piece] = [LEAD_IN, shape] * num_sources
    sizes = Sizes([pieces], [[WORDS] * GROUP], shape[0] * shape[1])
    encoding, decoding = vae_flops(side_px, of_edit=False)
    once = preparing_work(IMAGE_21, sizes, 2).flops + num_sources * encoding
    steps = num_steps * step_work(IMAGE_21, sizes, 2).flops
    return (once + steps) / GROUP + decoding


def edit(side_px: int, num_seen: int, num_steps: int, guided: bool) -> float:
    """The same of Edit or Plus with one source, of which the text holds `num_seen` tokens."""
    tokens = (side_px // PATCH_PX) ** 2
    words = [WORDS + num_seen] * (2 if guided else 1)
    encoding, decoding = vae_flops(side_px, of_edit=True)
    step = denoising_work(EDIT, tokens, tokens, words, 2).flops
    return num_steps * step + encoding / GROUP + decoding


def vae_flops(side_px: int, *, of_edit: bool) -> tuple[float, float]:
    """(of encoding one picture, of decoding one)."""
    from diffusers import AutoencoderKLQwenImage, AutoencoderKLQwenImage21

    with torch.device("meta"):
        vae: Any = (
            FrameVae(AutoencoderKLQwenImage())
            if of_edit
            else PictureVae(AutoencoderKLQwenImage21())
        )
    channels = 3 if of_edit else 4
    with torch.no_grad(), FlopCount() as encoded:
        latents = vae.encode(torch.empty(1, channels, side_px, side_px, device="meta"))
    with torch.no_grad(), FlopCount() as decoded:
        vae.decode(latents)
    return encoded.flops, decoded.flops


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
