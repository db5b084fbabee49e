"""Keeps the VAE's latents of source pictures, so that each is encoded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from cachetools import LRUCache
from PIL.Image import Image

from rl.files.images import digest

NUM_KEPT_SOURCES = 64
"""Latents kept between batches and calls (0.5 MB each at 1024^2 in bfloat16)."""

Size = tuple[int, int]
"""(width, height), px."""
Encode = Callable[[list[Image], Size], torch.Tensor]
"""Pictures, and the size that they are resized to -> packed latents [B, tokens, channels]."""


class SourceLatents:
    """Latents of one VAE, the last NUM_KEPT_SOURCES."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._kept: LRUCache[tuple[bytes, Size], torch.Tensor] = LRUCache(NUM_KEPT_SOURCES)

    def of(self, pictures_B: Sequence[Image], size: Size) -> torch.Tensor:
        """[B, tokens, channels], each picture encoded once; the new ones together."""
        keys_B = [(digest(picture), size) for picture in pictures_B]
        found = {key: self._kept[key] for key in keys_B if key in self._kept}
        new = {k: p for k, p in zip(keys_B, pictures_B, strict=True) if k not in found}
        if new:
            latents = self._encode(list(new.values()), size)
            found |= zip(new, latents.split(1), strict=True)
        self._kept.update((key, found[key]) for key in keys_B)
        return torch.cat([found[key] for key in keys_B])
