"""How well scores separate right from wrong results, and how well they repeat.

Axes in names: `_P` pairs of a right and a wrong result, `_C` cases, `_PR` pictures x readings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

Interval = tuple[float, float]


def auroc(case_P: np.ndarray, right_P: np.ndarray, wrong_P: np.ndarray) -> tuple[float, Interval]:
    """(P(a right result scores above a wrong one), its 95 % interval); nan without pairs.

    Ties count half: the area under the ROC curve (Mann and Whitney 1947), of each right value
    against each wrong one. [P] int: the pair's case; [P] float: the values of its two results.
    The variance is that of DeLong et al. 1988, summed by case (Obuchowski 1997), because a case's
    pairs share a scene and the right result. The interval is Wilson's for as many independent
    results as have this variance (Korn and Graubard 1998), at most two a case: so it is not empty
    where no error was seen.
    """
    if not len(case_P):
        return math.nan, (math.nan, math.nan)
    won_P, kept_P = _share_below(right_P, wrong_P), 1 - _share_below(wrong_P, right_P)
    area, num_cases = float(won_P.mean()), len(np.unique(case_P))
    part_C = np.bincount(case_P, won_P + kept_P - 2 * area) / len(case_P)
    variance = float((part_C**2).sum()) * num_cases / max(num_cases - 1, 1)
    size = 2.0 * num_cases
    if variance > 0:
        size = min(size, area * (1 - area) / variance)
    return area, wilson_interval(area, size)


def _share_below(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Share of `others` below each of `values`; equal ones count half."""
    ordered = np.sort(others)
    num_below = np.searchsorted(ordered, values) + np.searchsorted(ordered, values, "right")
    return num_below / (2 * len(ordered))


def wilson_interval(share: float, num_all: float) -> Interval:
    """95 % interval of a share of `num_all` independent draws (Wilson 1927); it is not empty at 0 %
    and 100 %. Nan for no draws."""
    if num_all == 0:
        return math.nan, math.nan
    z = 1.959964
    centre = (share + z * z / (2 * num_all)) / (1 + z * z / num_all)
    half = math.sqrt(share * (1 - share) / num_all + z * z / (4 * num_all**2))
    half *= z / (1 + z * z / num_all)
    return max(0.0, centre - half), min(1.0, centre + half)


def noise_sd(readings_PR: np.ndarray) -> float:
    """Standard deviation of repeated readings of one picture: the root of the mean variance over
    pictures (ddof 1). [P, R] float, R >= 2."""
    return float(np.sqrt(readings_PR.var(axis=1, ddof=1).mean()))


def reliability(groups: Sequence[np.ndarray]) -> float:
    """ICC(1,1) within groups (Shrout and Fleiss 1979): the share of the variance of one reading,
    among the pictures of one group, that repeats.

    `groups`: a [P, R] float array of each group, P and R >= 2, R equal in all. Group means are
    subtracted first, because GRPO's advantages do so too. Nan if nothing varies; may be negative.
    """
    num_readings = groups[0].shape[1]
    num_pictures = sum(len(group) for group in groups)
    means = [group.mean(axis=1) for group in groups]
    between = num_readings * sum(float(((m - m.mean()) ** 2).sum()) for m in means)
    between /= num_pictures - len(groups)
    within = sum(float(group.var(axis=1, ddof=1).sum()) for group in groups) / num_pictures
    total = between + (num_readings - 1) * within
    return (between - within) / total if total > 1e-12 else math.nan


def readings_for(one: float, wanted: float) -> int | None:
    """Fewest readings whose mean has the `wanted` reliability, if one has the reliability `one`
    (Spearman and Brown 1910: n = wanted (1 - one) / (one (1 - wanted))); None if no number has."""
    if not one > 0:
        return None
    return max(1, math.ceil(wanted * (1 - one) / (one * (1 - wanted)) - 1e-9))


def effective_levels(values: Sequence[float]) -> float:
    """exp(entropy) of the distribution of values: the number of levels really used."""
    shares = np.array(list(Counter(values).values()), float) / max(len(values), 1)
    return float(np.exp(-(shares * np.log(shares)).sum()))
