"""The Emu3 render loop: grids of codes in, pictures out, each distinct one decoded once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
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

BatchOf = Callable[[np.ndarray], tuple[Hashable, int]]
"""Codes -> (key, limit) of their batch, as `Renderer.batch_of`."""


class Emu3VqLoop:
    """Decodes codes to RGB pictures. A picture's last bits depend on its batch, so what was decoded
    before does not change a batch."""

    def __init__(self, codec: Emu3Codec, batch_of: BatchOf, may_split: bool = True) -> None:
        self.codec = codec
        self._batch_of, self._may_split = batch_of, may_split
        self._cache: LRUCache[bytes, Image.Image] = LRUCache(NUM_KEPT_PICTURES)
        self._fits: Fits = {}

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Outcome]]:
        """Yield `(number of the job, picture or failure)`, batch by batch, as they fill.

        A failure blames the policy for invalid codes, and the renderer if the decoder fails.
        """

        def known(codes: np.ndarray) -> Outcome | None:
            reason = self._why_invalid(codes)
            return RenderFailure(reason, blame="policy") if reason else None

        payloads = (job.payload for job in jobs)
        return render_in_batches(
            payloads, self._batch_of, known, self._draw_batch, self._fits, self._may_split
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
            missing, lambda codes: (None, 1), lambda codes: None, self._draw_batch, {}
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

    def _draw_batch(self, grids: Sequence[np.ndarray], key: Hashable) -> list[Outcome]:
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
