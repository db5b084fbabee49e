"""From a diffusion model's latents to pictures: in slices that fit, and none with NaN in it.

What: what the diffusion render loops do after the last step. What not: the VAEs themselves. Imports
torch, so only render loops import this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image

from rl.types import RenderFailure

DECODED_PX_AT_ONCE = 1024 * 1024
"""Area decoded together: one 1024^2 picture fills a device and its memory, small ones share."""


def decode_in_slices(
    latents: torch.Tensor, decode: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`decode` of [B, ..., h, w] (a latent is 8x8 px), as many pictures at once as fill
    DECODED_PX_AT_ONCE."""
    picture_px = latents.shape[-1] * latents.shape[-2] * 8 * 8
    slices = latents.split(max(1, DECODED_PX_AT_ONCE // picture_px))
    return torch.cat([decode(part) for part in slices])


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
