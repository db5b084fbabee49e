"""Means of paired differences whose samples may share source pictures, with errors and intervals.

Axes: `_S` samples, `_C` clusters: samples that share a picture, directly or through others.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

LEAST_FALL = 0.02
"""Reward (0..1), a fifth of a judge's mark of ten: a smaller fall is not worth an alarm."""
NUM_ERRORS = 3.0
"""Standard errors beyond which a fall is no noise: of a run's few dozen held-out evaluations, less
than one in twenty runs is alarmed by chance (one-sided normal: 0.0013 each)."""
ALIKE = 0.01
"""Share of their mean: values no further apart are equal."""
NUM_RESAMPLES = 10_000
_MAX_CELLS = 4_000_000
"""Largest table of draws x clusters at a time."""


@dataclass(frozen=True)
class Paired:
    """Differences between two arms, sample by sample: what both share cancels."""

    mean: float
    error: float | None
    """Standard error of the mean; None for a single cluster."""
    num: int
    num_clusters: int

    @property
    def is_alarming(self) -> bool:
        """Whether it is a rise beyond noise, and large enough to matter."""
        if self.error is None:
            return False
        return self.mean > max(LEAST_FALL, student(NUM_ERRORS, self.num_clusters - 1) * self.error)


def paired(
    differences_S: Sequence[float], names_S: Sequence[Sequence[Hashable]] | None = None
) -> Paired | None:
    """None: nothing to compare. `names_S`: names of what each sample shows, at least one; None:
    nothing is shared. The error is cluster-robust (Liang and Zeger 1986); where samples share
    nothing it is the usual one."""
    if not differences_S:
        return None
    sums_C, sizes_C = _by_cluster(differences_S, names_S)
    num, num_clusters = len(differences_S), len(sums_C)
    mean = float(sums_C.sum()) / num
    error = None
    if num_clusters > 1:
        squares = float(((sums_C - mean * sizes_C) ** 2).sum())
        error = (squares * num_clusters / (num_clusters - 1)) ** 0.5 / num
    return Paired(mean, error, num, num_clusters)


def interval(
    values_S: Sequence[float], names_S: Sequence[Sequence[Hashable]] | None = None
) -> tuple[float, float] | None:
    """95 % interval of the mean: percentiles of a bootstrap over clusters with fixed draws, wider
    where clusters are few (Hesterberg 2015, section 4.2). None for one cluster, or values that are
    all alike, which say nothing about their spread."""
    if len(values_S) < 2 or are_alike(values_S):
        return None
    sums_C, sizes_C = _by_cluster(values_S, names_S)
    num = len(sums_C)
    if num < 2:
        return None
    draw = np.random.default_rng(0)
    rows = max(1, _MAX_CELLS // num)
    means = []
    for start in range(0, NUM_RESAMPLES, rows):
        picked = draw.integers(num, size=(min(rows, NUM_RESAMPLES - start), num))
        means.append(sums_C[picked].sum(1) / sizes_C[picked].sum(1))
    tail = NormalDist().cdf(-((num / (num - 1)) ** 0.5) * student(1.96, num - 1))
    low, high = np.quantile(np.concatenate(means), (tail, 1 - tail))
    return float(low), float(high)


def are_alike(values_S: Sequence[float]) -> bool:
    """Whether they are one difference, but for rounding."""
    return max(values_S) - min(values_S) <= ALIKE * abs(sum(values_S)) / len(values_S) + 1e-6


def student(z: float, num_free: int) -> float:
    """The quantile of Student's t that is as rare as the normal's z > 0 (Abramowitz and Stegun
    26.7.5): at z = 3 it is 7 % too small for 3 degrees of freedom, far too small for 1."""
    orders = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(order / num_free**power for power, order in enumerate(orders, 1))


def _by_cluster(
    values_S: Sequence[float], names_S: Sequence[Sequence[Hashable]] | None
) -> tuple[np.ndarray, np.ndarray]:
    """(sums_C, sizes_C) float64."""
    if names_S is None:
        return np.array(values_S, dtype=np.float64), np.ones(len(values_S))
    parents: dict[Hashable, Hashable] = {}

    def root(name: Hashable) -> Hashable:
        while (parent := parents.setdefault(name, name)) != name:
            name = parent
        return name

    for first, *others in names_S:
        for other in others:
            parents[root(other)] = root(first)
    sums: dict[Hashable, list[float]] = {}
    for value, names in zip(values_S, names_S, strict=True):
        sums.setdefault(root(names[0]), []).append(value)
    clusters = sums.values()
    return np.array([sum(v) for v in clusters]), np.array([float(len(v)) for v in clusters])
