"""What samples show: finds held-out pictures in training, and samples that share a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from rl.api.types import Sample

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE_PX = 8
SAME_VIEW = 0.075
"""Pictures whose 8 x 8 thumbnails are closer than this, relative to their contrast, are copies. On
64 x 64 px pictures, JPEG (quality >= 50) and resizing cause distances up to 0.068; the most similar
of two million pairs of generated scenes are 0.108 apart."""
SAME_ASPECT = 0.03
"""Relative difference of width / height: a resized copy rounds its sides."""


def shown(sample: Sample) -> tuple[str, ...]:
    """A hash of each source picture; of a sample without any, of its words, in any letter case."""
    if sample.source_codes is not None:
        contents = [repr(sample.source_codes.tolist()).encode()]
    elif sample.sources:
        contents = [repr(p.size).encode() + p.tobytes() for p in sample.sources]
    else:
        contents = [" ".join(sample.instruction.casefold().split()).encode()]
    return tuple(blake2b(content, digest_size=16).hexdigest() for content in contents)


class HeldOutContents:
    """The held-out samples' contents, to find training samples that repeat them."""

    def __init__(self, held_out: Sequence[Sample]) -> None:
        """Their pictures are read once, here."""
        self._ids = {name: sample.id for sample in held_out for name in shown(sample)}
        self._owners = [sample.id for sample in held_out for _ in sample.sources]
        pictures = [_view(picture) for sample in held_out for picture in sample.sources]
        self._views, self._contrasts, self._aspects = (
            np.array([picture[i] for picture in pictures]) for i in range(3)
        )

    def shared(self, training: Iterable[Sample]) -> dict[str, str]:
        """Id of each training sample that shows a held-out sample's picture, also in another size
        or file format, or has the same words if without pictures -> the held-out sample's id."""
        found = {}
        for sample in training:
            names = [name for name in shown(sample) if name in self._ids]
            copies = (self._copied(picture) for picture in sample.sources)
            held_out = self._ids[names[0]] if names else next(filter(None, copies), None)
            if held_out is not None:
                found[sample.id] = held_out
        return found

    def _copied(self, picture: Image) -> str | None:
        """The held-out sample that shows a copy of it."""
        if not self._owners:
            return None
        view, contrast, aspect = _view(picture)
        distances = np.sqrt(((self._views - view) ** 2).mean(-1))
        is_copy = distances < SAME_VIEW * np.minimum(self._contrasts, contrast)
        is_copy &= np.abs(self._aspects / aspect - 1) < SAME_ASPECT
        return self._owners[int(is_copy.argmax())] if is_copy.any() else None


def _view(picture: Image) -> tuple[np.ndarray, float, float]:
    """(thumbnail [8 * 8 * 3] float32 0..255, RMS deviation from channel means, width / height)."""
    from PIL.Image import Resampling

    small = picture.convert("RGB").resize((SIDE_PX, SIDE_PX), Resampling.BILINEAR, reducing_gap=3.0)
    view = np.asarray(small, dtype=np.float32).reshape(-1, 3)
    contrast = float(np.sqrt(((view - view.mean(0)) ** 2).mean()))
    return view.reshape(-1), contrast, picture.width / picture.height
