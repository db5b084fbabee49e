"""How well scores separate right from wrong results, and how well they repeat.

Axes in names: `_R` right results, `_W` wrong results, `_PR` pictures x readings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

NUM_RESAMPLES = 1000
Interval = tuple[float, float]


def auroc(right_R: np.ndarray, wrong_W: np.ndarray) -> float:
    """P(a right result scores above a wrong one), ties count half: the area under the ROC curve
    (Mann and Whitney 1947: U / (R W)). Float arrays; nan if one is empty."""
    if not len(right_R) or not len(wrong_W):
        return math.nan
    difference = right_R[:, None] - wrong_W[None, :]
    return float((difference > 0).mean() + 0.5 * (difference == 0).mean())


def auroc_interval(pairs: Sequence[tuple[float, float]]) -> Interval:
    """95 % percentile bootstrap of `auroc` over samples; `pairs`: (right, wrong) of each sample."""
    values = np.array(pairs, float).reshape(-1, 2)
    if not len(values):
        return math.nan, math.nan
    rng = np.random.default_rng(0)
    draws = rng.integers(len(values), size=(NUM_RESAMPLES, len(values)))
    areas = [auroc(values[draw, 0], values[draw, 1]) for draw in draws]
    low, high = np.percentile(areas, (2.5, 97.5))
    return float(low), float(high)


def wilson_interval(num_right: int, num_all: int) -> Interval:
    """95 % interval of a share (Wilson 1927); it is not empty at 0 % and 100 %."""
    if num_all == 0:
        return math.nan, math.nan
    z, share = 1.959964, num_right / num_all
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


def common_value(right: Sequence[float], wrong: Sequence[float]) -> tuple[float, float]:
    """(the value that right and wrong results have most in common, the smaller of its two shares).
    A judge that falls back to one value when it fails gives it to both. (nan, 0) if none is."""
    counts_right, counts_wrong = Counter(right), Counter(wrong)
    shares = {
        value: min(count / len(right), counts_wrong[value] / len(wrong))
        for value, count in counts_right.items()
        if counts_wrong[value]
    }
    return max(shares.items(), key=lambda item: item[1], default=(math.nan, 0.0))
