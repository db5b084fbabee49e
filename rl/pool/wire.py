"""Turns render jobs, samples and outcomes into plain containers of NumPy arrays, and back.

Ray pickles these containers and maps the arrays from shared memory. No class of this project is
pickled, so a worker accepts only what `unpacked_jobs` and `unpacked_samples` can build.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from rl.api.types import HiddenStates, RenderFailure, RenderJob, Sample
from rl.files import digest

MAX_BYTES = 2**30
"""Limit of one message's arrays."""
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
PREPARED = ("sources", "target", "source_codes", "target_codes")
"""Fields of `Sample` that a renderer may fill in."""
Message = dict[str, Any]
"""{'items': jobs or samples as dicts, 'arrays': the arrays that they name by their index}."""


class _Arrays:
    """Arrays of one message. Equal pictures and shared tensors are sent once."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self._known: dict[Any, Any] = {}
        self._num_bytes = 0

    def add(self, array: np.ndarray) -> int:
        self._num_bytes += array.nbytes
        if self._num_bytes > MAX_BYTES:
            raise ValueError(
                f"a batch for the render pool has more than {MAX_BYTES / 1e9:.1f} GB; "
                "lower renderer.batch_size"
            )
        self.arrays.append(np.ascontiguousarray(array))
        return len(self.arrays) - 1

    def tensor(self, tensor: torch.Tensor | None) -> Message | None:
        if tensor is None:
            return None
        if str(tensor.dtype) not in DTYPES:
            kinds = ", ".join(DTYPES)
            raise TypeError(f"a render pool cannot send states of {tensor.dtype}; give {kinds}")
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
        if key not in self._known:
            on_cpu = tensor.detach().cpu().contiguous()
            data = on_cpu.view(torch.int16) if on_cpu.dtype == torch.bfloat16 else on_cpu
            self._known[key] = {"dtype": str(tensor.dtype), "array": self.add(data.numpy())}
        return dict(self._known[key])

    def picture(self, image: Image.Image | None) -> int | None:
        if image is None:
            return None
        key = digest(image)
        if key not in self._known:
            known = image if image.mode in ("RGB", "RGBA") else image.convert("RGBA")
            self._known[key] = self.add(np.asarray(known))
        return int(self._known[key])

    def codes(self, codes: np.ndarray | None) -> int | None:
        return None if codes is None else self.add(codes)


def packed_jobs(jobs: Iterable[RenderJob]) -> Message:
    """The jobs of a batch, without what only rewards read. Raises ValueError for more than
    `MAX_BYTES`, TypeError for a payload that is neither text, codes nor hidden states."""
    arrays = _Arrays()
    items = []
    for job in jobs:
        sample = replace(job.sample, target=None, target_codes=None)
        payload = _packed_payload(job.payload, arrays)
        items.append(
            {"sample": _packed_sample(sample, arrays), "seed": job.noise_seed, "payload": payload}
        )
    return {"items": items, "arrays": arrays.arrays}


def packed_samples(samples: Iterable[Sample]) -> Message:
    """Samples with their pictures and codes, without what only rewards read."""
    arrays = _Arrays()
    items = [_packed_sample(sample, arrays) for sample in samples]
    return {"items": items, "arrays": arrays.arrays}


def unpacked_jobs(message: Message) -> list[RenderJob]:
    arrays = message["arrays"]
    return [
        RenderJob(
            _unpacked_sample(item["sample"], arrays),
            _unpacked_payload(item["payload"], arrays),
            int(item["seed"]),
        )
        for item in message["items"]
    ]


def unpacked_samples(message: Message) -> list[Sample]:
    return [_unpacked_sample(item, message["arrays"]) for item in message["items"]]


def packed_outcomes(outcomes: Sequence[Any]) -> list[Any]:
    """Per job [H, W, 3] uint8, (reason, blame) of a failure, or None."""
    packed: list[Any] = []
    for outcome in outcomes:
        if isinstance(outcome, RenderFailure):
            packed.append((outcome.reason, outcome.blame))
        else:
            packed.append(None if outcome is None else np.asarray(outcome.convert("RGB")))
    return packed


def unpacked_outcome(packed: Any) -> Image.Image | RenderFailure | None:
    if isinstance(packed, tuple):
        return RenderFailure(*packed)
    return None if packed is None else Image.fromarray(packed)


def digests(outcomes: Sequence[Any]) -> list[str]:
    """A hash per packed outcome: of the 8-bit pixels, or of the failure."""
    return [
        digest(Image.fromarray(each)).hex() if isinstance(each, np.ndarray) else repr(each)
        for each in outcomes
    ]


def _packed_sample(sample: Sample, arrays: _Arrays) -> Message:
    return {
        "id": sample.id,
        "instruction": sample.instruction,
        "category": sample.category,
        "sources": [arrays.picture(source) for source in sample.sources],
        "target": arrays.picture(sample.target),
        "source_codes": arrays.codes(sample.source_codes),
        "target_codes": arrays.codes(sample.target_codes),
    }


def _unpacked_sample(item: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Sample:
    def picture(index: int | None) -> Any:
        return None if index is None else Image.fromarray(arrays[index])

    def codes(index: int | None) -> np.ndarray | None:
        return None if index is None else arrays[index]

    return Sample(
        str(item["id"]),
        str(item["instruction"]),
        sources=tuple(picture(source) for source in item["sources"]),
        target=picture(item["target"]),
        source_codes=codes(item["source_codes"]),
        target_codes=codes(item["target_codes"]),
        category=str(item["category"]),
    )


def _packed_payload(payload: Any, arrays: _Arrays) -> Any:
    if isinstance(payload, str):
        return payload
    if isinstance(payload, np.ndarray):
        return {"codes": arrays.codes(payload)}
    if not isinstance(payload, HiddenStates):
        raise TypeError(
            f"a render pool cannot send a payload of type {type(payload).__name__}: give the "
            "renderer text, codes (a NumPy array) or HiddenStates"
        )
    return {
        "embeds": arrays.tensor(payload.embeds),
        "negative": arrays.tensor(payload.negative_embeds),
        "pictures": [(part.start, part.stop) for part in payload.pictures],
    }


def _unpacked_payload(packed: Any, arrays: Sequence[np.ndarray]) -> Any:
    if isinstance(packed, str):
        return packed
    if "codes" in packed:
        return arrays[packed["codes"]]

    def tensor(item: Mapping[str, Any] | None) -> Any:
        if item is None:
            return None
        # A copy, because Ray's arrays cannot be written.
        data = torch.from_numpy(arrays[item["array"]].copy())
        return data.view(DTYPES[item["dtype"]])

    return HiddenStates(
        tensor(packed["embeds"]),
        tensor(packed["negative"]),
        tuple(range(start, stop) for start, stop in packed["pictures"]),
    )
