"""Helpers around a model's latents: seeded noise, slices that fit in memory, checks for NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from PIL.Image import Image

from rl.api.types import RenderFailure

DECODED_PX_AT_ONCE = 1024 * 1024
"""Total picture area of one VAE call, for encoding as well as decoding: one 1024^2 picture fills a
device and its memory; smaller pictures are batched."""


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
    """Apply `run` to slices of a batch, each with as many rows as fit into DECODED_PX_AT_ONCE;
    `picture_px`: area of a row's picture."""
    return torch.cat([run(part) for part in rows.split(max(1, DECODED_PX_AT_ONCE // picture_px))])


def to_pictures(
    tensor: torch.Tensor, as_images: Callable[[torch.Tensor], list[Image]]
) -> list[Image | RenderFailure]:
    """`as_images` of [B, C, H, W]; a row with NaN or infinity is a failure."""
    finite = torch.isfinite(tensor).flatten(1).all(dim=1).tolist()
    return [
        picture if good else RenderFailure("non_finite: the renderer produced NaN or infinity")
        for picture, good in zip(as_images(torch.nan_to_num(tensor)), finite, strict=True)
    ]
