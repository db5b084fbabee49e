"""Pictures whose quality is known: a right result, and results that are wrong in a known way."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from rl.api.types import Sample
from rl.files import open_picture

CORRECT = "correct"
CLEARLY_WRONG = ("no_edit", "wrong_object", "wrong_colour", "other_result")
KINDS = {
    CORRECT: "the result that was asked for",
    "no_edit": "the source, unchanged",
    "wrong_object": "the edit, done to something else",
    "wrong_colour": "the edit, in a wrong colour",
    "partial": "half of the edit",
    "over_edit": "the edit, and other changes",
    "other_result": "another sample's result",
    "degraded": "the right result, blurred and compressed",
    "other_instruction": "the right result, judged by another instruction",
    "exchanged": "source and result exchanged",
    "worse": "the worse one of a labelled pair",
}
"""Kind of a result -> what it is."""
CHANGED = 12
"""A pixel has changed if a channel differs by more than this (of 255)."""
MIN_DIFFERENCE = 0.5
"""Mean difference (of 255) below which a wrong result looks like the right one and is left out."""


@dataclass(frozen=True, eq=False)
class Case:
    """One instruction, and results of known quality."""

    sample: Sample
    """Its `target` is the right result."""
    results: Mapping[str, tuple[Sample, Image.Image]]
    """Kind -> (the sample that the judge is shown, the result)."""


def case_of(sample: Sample, other: Sample, drawn: Mapping[str, Image.Image]) -> Case | None:
    """The results that can be made from a sample with a target and from `other`, which lends its
    instruction and its target. `drawn`: wrong results that are known already. None if the sample
    has no target, or one that equals its source."""
    if sample.target is None:
        return None
    target = sample.target.convert("RGB")
    results = dict(drawn)
    if sample.source is not None:
        source = sample.source.convert("RGB").resize(target.size)
        made = _edited(np.asarray(source), np.asarray(target))
        if made is None:
            return None
        results = {**made, **results, "no_edit": source}
    if other.target is not None:
        results["other_result"] = other.target.convert("RGB").resize(target.size)
    results["degraded"] = degraded(target)
    shown = {
        kind: (sample, picture)
        for kind, picture in results.items()
        if np.abs(np.asarray(picture, int) - np.asarray(target, int)).mean() > MIN_DIFFERENCE
    }
    if other.instruction != sample.instruction:
        shown["other_instruction"] = (replace(sample, instruction=other.instruction), target)
    if len(sample.sources) == 1:
        shown["exchanged"] = (replace(sample, sources=(target,)), results["no_edit"])
    ordered = {kind: shown[kind] for kind in KINDS if kind in shown}
    return Case(sample, {CORRECT: (sample, target), **ordered})


def cases_of(samples: Sequence[Sample], num_cases: int) -> list[Case]:
    """The first `num_cases` cases of a data set; the next sample with another instruction is each
    sample's `other`."""
    cases: list[Case] = []
    for i, sample in enumerate(samples):
        following = (*samples[i + 1 :], *samples[:i])
        others = (each for each in following if each.instruction != sample.instruction)
        case = case_of(sample, next(others, sample), {})
        if case is not None and len(cases) < num_cases:
            cases.append(case)
    return cases


def degraded(picture: Image.Image) -> Image.Image:
    """An eighth of the resolution, and JPEG of quality 10."""
    small = picture.resize([max(1, side // 8) for side in picture.size])
    file = io.BytesIO()
    small.resize(picture.size, Image.Resampling.NEAREST).save(file, "JPEG", quality=10)
    return open_picture(file, ("JPEG",)).convert("RGB")


def _edited(source: np.ndarray, target: np.ndarray) -> dict[str, Image.Image] | None:
    """Wrong results [h, w, 3] uint8 made from the pixels that an edit changes; None if none do."""
    changed = np.abs(source.astype(int) - target).max(-1) > CHANGED
    if not changed.any():
        return None
    rows, columns = (np.flatnonzero(changed.any(axis)) for axis in (1, 0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    results = {"wrong_colour": np.where(changed[..., None], 255 - target, target)}
    partial = target.copy()
    partial[:, (left + right) // 2 :] = source[:, (left + right) // 2 :]
    results["partial"] = partial
    width = changed.shape[1]
    if changed.mean() < 0.5:
        results["over_edit"] = np.where(changed[..., None], target, 255 - target)
    if 2 * (right - left) <= width:  # there is room for the edit on the other side
        moved, start = source.copy(), 0 if left >= width - right else width - (right - left)
        patch = target[top:bottom, left:right]
        moved[top:bottom, start : start + patch.shape[1]] = patch
        results["wrong_object"] = moved
    return {kind: Image.fromarray(picture) for kind, picture in results.items()}
