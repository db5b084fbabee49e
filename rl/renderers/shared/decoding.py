"""Between pictures and a diffusion model's latents: seeded noise, slices that fit, no NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from PIL import Image

from rl.api.types import RenderFailure

DECODED_PX_AT_ONCE = 1024 * 1024
"""Area that a VAE takes together, pictures to encode too: one 1024^2 picture fills a device and its
memory, small ones share."""


def seeded_noise(seeds_B: Iterable[int], shape: Sequence[int]) -> torch.Tensor:
    """Standard-normal noise [B, *shape], float32 on the CPU: a row depends on its seed alone,
    whatever the device, the dtype and the batch."""
    return torch.stack(
        [
            torch.randn(
                *shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32
            )
            for seed in seeds_B
        ]
    )


def in_slices(
    rows: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor], picture_px: int
) -> torch.Tensor:
    """`run` over rows of a batch, as many at once as fill DECODED_PX_AT_ONCE."""
    return torch.cat([run(part) for part in rows.split(max(1, DECODED_PX_AT_ONCE // picture_px))])


def decode_in_slices(
    latents: torch.Tensor, decode: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`decode` of [B, ..., h, w] in slices that fit; a latent is 8x8 px."""
    return in_slices(latents, decode, latents.shape[-1] * latents.shape[-2] * 8 * 8)


def to_pictures(tensor: torch.Tensor, pixels: Any) -> list[Image.Image | RenderFailure]:
    """[B, 3, H, W], nominally -1..1, as 8-bit RGB; a row with NaN or infinity is a failure.

    `pixels`: diffusers' VaeImageProcessor.
    """
    finite = torch.isfinite(tensor).flatten(1).all(dim=1).tolist()
    pictures = pixels.postprocess(torch.nan_to_num(tensor), output_type="pil")
    return [
        picture if good else RenderFailure("non_finite: the renderer produced NaN or infinity")
        for picture, good in zip(pictures, finite, strict=True)
    ]
