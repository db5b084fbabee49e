"""The Emu3 render loop: grids of codes in, pictures out, each distinct one decoded once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from cachetools import LRUCache
from PIL import Image

from rl.api.types import RenderFailure, RenderJob, Sample
from rl.renderers.emu3_vq.codec import Emu3Codec
from rl.renderers.shared.batches import Fits, Outcome, render_in_batches
from rl.renderers.shared.decoding import to_pictures

NUM_KEPT_PICTURES = 256
"""Decoded sources and targets cached between calls (0.2 MB each at 256^2)."""

BATCH_UNIT_PX = 256 * 256
"""Picture area to which `batch_size` applies; larger pictures get smaller batches in proportion."""

Grid = tuple[int, ...]
"""Shape of a picture's codes. Pictures of one shape share a batch."""


class Emu3VqLoop:
    """Decodes codes to RGB pictures; jobs with equal codes get the same picture object."""

    def __init__(self, codec: Emu3Codec, batch_size: int) -> None:
        self.codec = codec
        self.batch_size = batch_size
        self._cache: LRUCache[bytes, Image.Image] = LRUCache(NUM_KEPT_PICTURES)
        self._fits: Fits = {}

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Outcome]]:
        """Yield `(number of the job, picture or failure)`, batch by batch, as they fill.

        A failure blames the policy for invalid codes, and the renderer if the decoder fails.
        """
        drawn: dict[bytes, Outcome] = {}

        def known(codes: np.ndarray) -> Outcome | None:
            if reason := self._why_invalid(codes):
                return RenderFailure(reason, blame="policy")
            return drawn.get(_key(codes))

        def draw(batch: Sequence[np.ndarray], grid: Grid) -> list[Outcome]:
            new = {_key(codes): codes for codes in batch if _key(codes) not in drawn}
            if new:
                drawn.update(zip(new, self._draw_batch(list(new.values())), strict=True))
            return [drawn[_key(codes)] for codes in batch]

        return render_in_batches(
            (job.payload for job in jobs), self._batch_of, known, draw, self._fits
        )

    def decode_sources(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples, with missing `source` and `target` pictures decoded from their codes.

        Raises ValueError if this decoder does not know the codes, RuntimeError if it fails.
        """
        codes_by_key: dict[bytes, np.ndarray] = {}
        for sample in samples:
            for name, codes in _missing_pictures(sample):
                if reason := self._why_invalid(codes):
                    raise ValueError(
                        f"sample {sample.id!r}: its {name} cannot be drawn: {reason}; tokenise the "
                        "data with the renderer's own model_path (rl prepare)"
                    )
                codes_by_key[_key(codes)] = codes
        drawn = {key: self._cache[key] for key in codes_by_key if key in self._cache}
        missing = [codes for key, codes in codes_by_key.items() if key not in drawn]
        for number, outcome in render_in_batches(
            missing,
            self._batch_of,
            known=lambda codes: None,
            render=lambda batch, grid: self._draw_batch(batch),
            fits=self._fits,
        ):
            if isinstance(outcome, RenderFailure):
                raise RuntimeError(f"a sample's picture cannot be decoded: {outcome.reason}")
            drawn[_key(missing[number])] = outcome
        self._cache.update(drawn)
        return [_with_pictures(s, drawn) for s in samples]

    def _why_invalid(self, codes: np.ndarray) -> str | None:
        if codes.ndim != 2 or not codes.size:
            return f"bad_grid: codes of shape {list(codes.shape)}, not [h, w]"
        low, high, last = codes.min(), codes.max(), self.codec.model.config.codebook_size - 1
        if low >= 0 and high <= last:
            return None
        return f"bad_code: {low if low < 0 else high} is not in the codebook's 0..{last}"

    def _batch_of(self, codes: np.ndarray) -> tuple[Grid, int]:
        area_px = max(1, codes.size * self.codec.patch_px**2)
        limit = min(self.batch_size, max(1, self.batch_size * BATCH_UNIT_PX // area_px))
        return codes.shape, limit

    def _draw_batch(self, grids: Sequence[np.ndarray]) -> list[Outcome]:
        codes = torch.from_numpy(np.stack(grids).astype(np.int64))
        return [*to_pictures(self.codec.decode_tensor(codes), self.codec.to_pictures)]


def _with_pictures(sample: Sample, drawn: Mapping[bytes, Image.Image]) -> Sample:
    pictures = {name: drawn[_key(codes)] for name, codes in _missing_pictures(sample)}
    sources = (pictures["source"],) if "source" in pictures else sample.sources
    return replace(sample, sources=sources, target=pictures.get("target", sample.target))


def _missing_pictures(sample: Sample) -> Iterator[tuple[str, np.ndarray]]:
    """('source' or 'target', its codes) for each picture that the sample has only as codes."""
    if sample.source is None and sample.source_codes is not None:
        yield "source", sample.source_codes
    if sample.target is None and sample.target_codes is not None:
        yield "target", sample.target_codes


def _key(codes: np.ndarray) -> bytes:
    """A cache key; two keys are equal exactly if their grids are."""
    return np.array(codes.shape, np.int64).tobytes() + codes.astype(np.int64).tobytes()
