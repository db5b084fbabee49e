"""Means of paired differences, with standard errors and intervals; samples may share pictures."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

# Axes: `_S` samples, `_C` clusters: samples that share pictures, directly or through other
# samples.

LEAST_FALL = 0.02
"""Smallest fall in reward (0..1) worth an alarm: 0.2 points on a judge's scale of 0 to 10."""
NUM_ERRORS = 3.0
"""A fall of more standard errors than this is not noise: over a few dozen held-out evaluations,
fewer than one run in twenty raises a false alarm (one-sided normal: 0.0013 per evaluation)."""
ALIKE = 0.01
"""Values are equal if they differ by at most this share of their mean."""
NUM_RESAMPLES = 10_000
_MAX_CELLS = 4_000_000
"""Largest table (draws x clusters) that is computed at once."""


@dataclass(frozen=True)
class Paired:
    """Mean difference between two variants' rewards of the same samples."""

    mean: float
    error: float | None
    """Standard error of the mean; None for a single cluster."""
    num_clusters: int

    @property
    def is_alarming(self) -> bool:
        """Whether the mean is positive beyond noise, and large enough to matter."""
        if self.error is None:
            return False
        return self.mean > max(LEAST_FALL, student(NUM_ERRORS, self.num_clusters - 1) * self.error)


def paired(
    differences_S: Sequence[float], names_S: Sequence[Sequence[Hashable]] | None = None
) -> Paired | None:
    """Mean and standard error; None without differences. `names_S`: one or more names of what each
    sample shows; None: samples share nothing. The error is cluster-robust (Liang and Zeger 1986),
    which equals the usual standard error if samples share nothing."""
    if not differences_S:
        return None
    sums_C, sizes_C = _by_cluster(differences_S, names_S)
    if len(sums_C) == 1:
        return Paired(float(sums_C[0] / sizes_C[0]), None, 1)
    return Paired(*ratio(sums_C, sizes_C), len(sums_C))


def ratio(sums_C: np.ndarray, sizes_C: np.ndarray) -> tuple[float, float]:
    """(sum(sums) / sum(sizes), its cluster-robust standard error) over C >= 2 clusters."""
    num, total = len(sums_C), float(sizes_C.sum())
    mean = float(sums_C.sum()) / total
    squares = float(((sums_C - mean * sizes_C) ** 2).sum())
    return mean, (squares * num / (num - 1)) ** 0.5 / total


def interval(
    values_S: Sequence[float], names_S: Sequence[Sequence[Hashable]] | None = None
) -> tuple[float, float] | None:
    """95 % interval of the mean: percentiles of a bootstrap over clusters with a fixed seed,
    widened for few clusters (Hesterberg 2015, section 4.2). None for one cluster, or if all values
    are equal, so that their spread is unknown."""
    spread = max(values_S, default=0.0) - min(values_S, default=0.0)
    if spread <= ALIKE * abs(sum(values_S)) / max(1, len(values_S)) + 1e-6:
        return None
    sums_C, sizes_C = _by_cluster(values_S, names_S)
    num = len(sums_C)
    if num < 2:
        return None
    rng = np.random.default_rng(0)
    rows = max(1, _MAX_CELLS // num)
    means = []
    for start in range(0, NUM_RESAMPLES, rows):
        picked = rng.integers(num, size=(min(rows, NUM_RESAMPLES - start), num))
        means.append(sums_C[picked].sum(1) / sizes_C[picked].sum(1))
    tail = NormalDist().cdf(-((num / (num - 1)) ** 0.5) * student(1.96, num - 1))
    low, high = np.quantile(np.concatenate(means), (tail, 1 - tail))
    return float(low), float(high)


def student(z: float, num_free: int) -> float:
    """The Student's t quantile with the same tail probability as the normal's z > 0 (Abramowitz and
    Stegun 26.7.5). At z = 3 it is 7 % too small for 3 degrees of freedom, far too small for 1."""
    orders = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(order / num_free**power for power, order in enumerate(orders, 1))


def _by_cluster(
    values_S: Sequence[float], names_S: Sequence[Sequence[Hashable]] | None
) -> tuple[np.ndarray, np.ndarray]:
    """(sum of the values, number of samples) of each cluster, float64."""
    names_S = names_S or [[number] for number in range(len(values_S))]
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
