"""Hashes of what samples show, and a search for held-out pictures in training samples."""

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
"""Pictures are copies if their 8 x 8 thumbnails' distance, relative to their contrast, is less. For
64 x 64 px pictures, JPEG (quality >= 50) and resizing cause distances up to 0.068; the smallest
distance of two million pairs of generated scenes is 0.108."""
SAME_ASPECT = 0.03
"""Copies differ in width / height by less than this share: resizing rounds the sides."""


def contents_of(sample: Sample) -> tuple[str, ...]:
    """A hash per source picture; without sources, one of the instruction, ignoring letter case."""
    if sample.source_codes is not None:
        contents = [repr(sample.source_codes.tolist()).encode()]
    elif sample.sources:
        contents = [repr(p.size).encode() + p.tobytes() for p in sample.sources]
    else:
        contents = [" ".join(sample.instruction.casefold().split()).encode()]
    return tuple(blake2b(content, digest_size=16).hexdigest() for content in contents)


class HeldOutContents:
    """Finds training samples that repeat a held-out sample."""

    def __init__(self, held_out: Sequence[Sample]) -> None:
        """Reads the held-out samples' pictures once."""
        self._ids = {key: sample.id for sample in held_out for key in contents_of(sample)}
        self._owners = [sample.id for sample in held_out for _ in sample.sources]
        views = [_view(picture) for sample in held_out for picture in sample.sources]
        self._views, self._contrasts, self._aspects = (
            np.array([view[i] for view in views]) for i in range(3)
        )

    def shared(self, training: Iterable[Sample]) -> dict[str, str]:
        """Id of each training sample that repeats a held-out sample -> the held-out sample's id. It
        has a copy of its picture, of any size or file format; without pictures, its instruction."""
        held_out_of = {}
        for sample in training:
            keys = [key for key in contents_of(sample) if key in self._ids]
            copied_ids = (self._copied(picture) for picture in sample.sources)
            held_out_id = self._ids[keys[0]] if keys else next(filter(None, copied_ids), None)
            if held_out_id is not None:
                held_out_of[sample.id] = held_out_id
        return held_out_of

    def _copied(self, picture: Image) -> str | None:
        """Id of the held-out sample whose picture is a copy of this one; None if there is none."""
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
