"""Measures what a policy could exploit in a judge: likeness to the source, sharpness, saturation,
length; and whether the reward pays for it within groups.

Axes: `_G` completions of a group, `_C` groups of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from PIL.Image import Resampling

from rl.algorithm.metrics import Metrics
from rl.api.types import Episode, Status
from rl.run.paired import ratio

if TYPE_CHECKING:
    from PIL.Image import Image

    from rl.ranks.dist import Dist

SIDE_PX = 32
"""Side of the thumbnails that are compared with the source."""
COPY_LEVEL = 1 / 8
"""A picture is a copy if no pixel of its thumbnail differs from the source's by more, in any
channel (0..1). In small runs the largest difference is 0.07 to 0.12 for unchanged pictures, which a
VAE has decoded, and above 0.35 for most edited ones."""
CROP_PX = 512
"""Sharpness is measured in at most this square in the middle, at full resolution."""
PAID = 0.5
"""A copy with at least this reward (0..1) is rewarded without a visible change."""
COMPARED = ("similarity", "sharpness", "saturation", "length")
"""Signals whose correlation with the reward is measured."""


@dataclass(frozen=True)
class View:
    """What is compared of a picture."""

    thumbnail: np.ndarray
    """[SIDE_PX, SIDE_PX, 3] float32, 0..1."""
    sharpness: float
    saturation: float

    @classmethod
    def of(cls, picture: Image) -> View:
        small = picture.convert("RGB").resize((SIDE_PX, SIDE_PX), Resampling.BOX)
        saturation = float(np.asarray(small.convert("HSV"))[..., 1].mean()) / 255
        return cls(np.asarray(small, dtype=np.float32) / 255, _sharpness(picture), saturation)


def _sharpness(picture: Image) -> float:
    if min(picture.size) < 3:
        return 0.0
    left, top = (max(0, (side - CROP_PX) // 2) for side in picture.size)
    width, height = (min(side, CROP_PX) for side in picture.size)
    middle = picture.crop((left, top, left + width, top + height))
    light = np.asarray(middle.convert("L"), dtype=np.int16)
    neighbours = light[:-2, 1:-1] + light[2:, 1:-1] + light[1:-1, :-2] + light[1:-1, 2:]
    return float(np.log2((neighbours - 4 * light[1:-1, 1:-1]).var(dtype=np.float32) + 1))


def signals(picture: View, source: View | None) -> dict[str, float]:
    """Four numbers of one picture; without a source the first two are absent and the others
    absolute.

    similarity: 1 - mean absolute difference to the source's thumbnail (0..1); copy: 1 or 0
    (`COPY_LEVEL`); sharpness: log2(1 + variance of the luminance's Laplacian, levels of 0..255)
    in the middle, minus the source's; saturation: mean S of HSV (0..1), minus the source's.
    """
    if source is None:
        return {"sharpness": picture.sharpness, "saturation": picture.saturation}
    difference = np.abs(picture.thumbnail - source.thumbnail)
    return {
        "similarity": 1 - float(difference.mean()),
        "copy": float(difference.max() <= COPY_LEVEL),
        "sharpness": picture.sharpness - source.sharpness,
        "saturation": picture.saturation - source.saturation,
    }


def _signals_of_group(episodes_G: Sequence[Episode]) -> list[dict[str, float]]:
    """_G, `signals` of each completion's first picture, and its length in tokens."""
    sources: dict[tuple[int, int], View | None] = {}
    known: dict[int, dict[str, float]] = {}  # equal completions share one picture
    for episode in episodes_G:
        picture, source = episode.image, episode.prompt.sample.source
        if picture is None or id(picture) in known:
            continue
        if picture.size not in sources:
            sources[picture.size] = (
                None
                if source is None
                else View.of(source.convert("RGB").resize(picture.size, Resampling.BICUBIC))
            )
        known[id(picture)] = signals(View.of(picture), sources[picture.size])
    return [
        {**known.get(id(e.image), {}), "length": float(len(e.completion.token_ids))}
        for e in episodes_G
    ]


def add_signals(metrics: Metrics, episodes_PG: Sequence[Sequence[Episode]], dist: Dist) -> None:
    """Add the signals' means, the shares of copies and of rewarded copies, and each signal's
    correlation with the reward within groups. Collective."""
    sums: dict[str, list[tuple[float, float, float]]] = {name: [] for name in COMPARED}
    for episodes_G in episodes_PG:
        found_G = _signals_of_group(episodes_G)
        for episode, found in zip(episodes_G, found_G, strict=True):
            for name in ("similarity", "sharpness", "saturation"):
                if name in found:
                    metrics.add(f"pictures/{name}", found[name])
            if "copy" in found:
                metrics.add("pictures/copies", found["copy"])
                if episode.reward is not None:
                    paid = found["copy"] and episode.reward >= PAID
                    metrics.add("pictures/rewarded_copies", float(paid))
        for name in COMPARED:
            pairs = [
                (found[name], episode.reward)
                for episode, found in zip(episodes_G, found_G, strict=True)
                if episode.status is Status.SCORED and episode.reward is not None and name in found
            ]
            sums[name].append(_sums_of_squares(pairs))
    gathered = dist.gather(sums)
    for name in COMPARED:
        sums_C3 = np.array([sums_3 for of_rank in gathered for sums_3 in of_rank[name]])
        correlation = within_groups(sums_C3.reshape(-1, 3))
        if correlation is not None:
            metrics.maximum(f"reward/correlation/{name}", correlation[0])
            metrics.maximum(f"reward/correlation/{name}_error", correlation[1])


def _sums_of_squares(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """(S_xx, S_xy, S_yy) of the pairs' deviations from their means."""
    if len(pairs) < 2:
        return 0.0, 0.0, 0.0
    x, y = (np.array(values) - fmean(values) for values in zip(*pairs, strict=True))
    return float(x @ x), float(x @ y), float(y @ y)


def within_groups(sums_C3: np.ndarray) -> tuple[float, float] | None:
    """(correlation within groups, its standard error) from the groups' (S_xx, S_xy, S_yy), [C, 3].

    The correlation is the slope of the pooled regression within groups, S_xy / S_xx, times
    sqrt(S_xx / S_yy); its error is the slope's cluster-robust one (`paired`) times the same factor.
    None if fewer than two groups differ in both.
    """
    used = sums_C3[(sums_C3[:, 0] > 1e-12) & (sums_C3[:, 2] > 1e-12)]
    if len(used) < 2:
        return None
    slope, error = ratio(used[:, 1], used[:, 0])
    scale = float(np.sqrt(used[:, 0].sum() / used[:, 2].sum()))
    return slope * scale, error * scale
