"""Seeded noise, VAE calls in slices that fit in memory, and checks of pictures for NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from PIL.Image import Image

from rl.api.types import RenderFailure

DECODED_PX_AT_ONCE = 1024 * 1024
"""Total picture area of one VAE call, for encoding as well as decoding: one 1024^2 picture keeps
a GPU busy by itself; smaller pictures are batched."""


def seeded_noise(seeds_B: Iterable[int], shape: Sequence[int]) -> torch.Tensor:
    """Standard-normal noise [B, *shape], float32 on the CPU: a row depends only on its seed,
    not on the device, the dtype or the batch."""
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
    """Convert [B, C, H, W] with `as_images`; a row with NaN or infinity becomes a failure."""
    finite_B = torch.isfinite(tensor).flatten(1).all(dim=1).tolist()
    return [
        picture if is_finite else RenderFailure("non_finite: the renderer produced NaN or infinity")
        for picture, is_finite in zip(as_images(torch.nan_to_num(tensor)), finite_B, strict=True)
    ]
