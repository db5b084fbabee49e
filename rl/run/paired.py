"""Paired differences with their errors, and signs in metrics that a reward is exploited."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np

# ---- paired --------------------------------------------------------------------------------------
# Means of paired differences, with standard errors and intervals; samples may share pictures.
#
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
    """Mean difference between two arms' rewards of the same samples."""

    mean: float
    error: float | None
    """Standard error of the mean; None for a single cluster."""
    num: int
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
    num, num_clusters = len(differences_S), len(sums_C)
    mean, error = ratio(sums_C, sizes_C) if num_clusters > 1 else (float(sums_C.sum()) / num, None)
    return Paired(mean, error, num, num_clusters)


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
    if len(values_S) < 2 or are_alike(values_S):
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


def are_alike(values_S: Sequence[float]) -> bool:
    """Whether all values are equal up to rounding."""
    return max(values_S) - min(values_S) <= ALIKE * abs(sum(values_S)) / len(values_S) + 1e-6


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


# ---- exploits ------------------------------------------------------------------------------------
# Alarms for what a policy exploits in its judge. They read only lines of metrics, so a resumed run
# and the page come to the same alarms.

FIRST = RECENT = 5
"""The last `RECENT` iterations are compared with the first `FIRST`: few, because small runs have
learnt an exploit after 7. No alarm for growth is logged before iteration 10."""
PAY_ITERATIONS = 10
"""Iterations over which a correlation with the reward is averaged."""
PAY_ERRORS = 2.0
"""The reward pays for a signal if their average is above 0 by this many standard errors."""
FOLLOWS = 0.5
FOLLOWED = ("similarity", "sharpness", "saturation")
"""An average above `FOLLOWS` by as many is an alarm of its own for these signals (in sound small
runs it was at most 0.41). Length is not among them: a sound reward may demand a long form."""
KIND_EXCESS = 0.2
"""Unreadable replies cluster in a kind of instruction whose share is above that of all by this."""

Line = Mapping[str, float]


@dataclass(frozen=True)
class Growth:
    """An alarm for a metric that grows."""

    metric: str
    least: float
    """Smallest growth worth an alarm, in the metric's unit."""
    least_share: float
    """The same as a share of the first iterations' mean; both must be exceeded."""
    signal: str
    """The reward must pay for it (`reward/correlation/<signal>`); '': it need not."""
    what: str
    """Subject of the sentence."""


@dataclass(frozen=True)
class Limit:
    """An alarm for a share that is too large on average of `RECENT` iterations."""

    metric: str
    most: float
    what: str
    """The sentence after the share."""


LIMITS = (
    Limit(
        "pictures/rewarded_copies",
        0.1,
        "of the graded pictures of the last {num} iterations equal their source and have a reward "
        "of at least 0.5 (pictures/rewarded_copies): the judge pays for doing nothing",
    ),
    Limit(
        "groups/unreadable",
        0.1,
        "of the groups of the last {num} iterations got mostly unreadable replies from the judge "
        "(groups/unreadable): they teach nothing, or the wrong thing; read the replies on the page",
    ),
)
GROWTHS = (
    Growth(
        "status/unreadable",
        0.05,
        1.0,
        "",
        "ever more of the judge's replies are unreadable; a policy that makes such pictures loses "
        "nothing unless judge.unreadable is 'lowest'",
    ),
    Growth("pictures/copies", 0.1, 1.0, "", "ever more pictures equal their sources"),
    Growth("pictures/sharpness", 0.5, 0.0, "sharpness", "pictures become sharper"),
    Growth("pictures/saturation", 0.03, 0.0, "saturation", "colours become stronger"),
    Growth("tokens/completion_mean", 1.0, 0.5, "length", "completions become longer"),
)


class ExploitWatch:
    """Reads a run's lines of metrics in order; reports each alarm once in a run."""

    def __init__(self) -> None:
        self._num = 0
        self._first: list[Line] = []
        self._last: deque[Line] = deque(maxlen=max(RECENT, PAY_ITERATIONS))
        self._reported: set[str] = set()

    def sentences(self, line: Line) -> Iterator[str]:
        """A sentence for each alarm that this line raises first; the line of iteration 0, which
        trains nothing, raises none."""
        if "optimizer/steps" not in line:
            return
        self._num += 1
        if self._num <= FIRST:
            self._first.append(line)
        self._last.append(line)
        found = {limit.metric: _beyond(limit, list(self._last)) for limit in LIMITS}
        found |= {"kind": _unreadable_kind(list(self._last))}
        found |= {signal: _pays(signal, list(self._last)) for signal in FOLLOWED}
        if self._num >= FIRST + RECENT:
            found |= {each.metric: _growth(each, self._first, list(self._last)) for each in GROWTHS}
        new = {key: text for key, text in found.items() if text and key not in self._reported}
        self._reported |= new.keys()
        yield from new.values()


def _values_in(lines: Sequence[Line], name: str) -> list[float]:
    return [line[name] for line in lines if line.get(name) is not None]


def _beyond(limit: Limit, last: Sequence[Line]) -> str:
    shares = _values_in(last[-RECENT:], limit.metric)
    if len(shares) < RECENT or fmean(shares) <= limit.most:
        return ""
    return f"{fmean(shares):.0%} {limit.what.format(num=RECENT)}"


def _unreadable_kind(last: Sequence[Line]) -> str:
    """One kind of instruction gets many more unreadable replies than all together."""
    overall = _values_in(last, "status/unreadable")
    prefix = "status/unreadable/"
    for name in sorted({name for line in last for name in line if name.startswith(prefix)}):
        shares = _values_in(last, name)
        if len(shares) >= RECENT and fmean(shares) > fmean(overall) + KIND_EXCESS:
            return (
                f"{fmean(shares):.0%} of the judge's replies about {name.removeprefix(prefix)!r} "
                f"are unreadable, {fmean(overall):.0%} of all ({name}): read them on the page, and "
                "audit the judge on such instructions"
            )
    return ""


def _correlation(last: Sequence[Line], signal: str) -> tuple[float, float, int]:
    """(mean correlation of the reward with the signal, its standard error, number of iterations);
    zeros if there is none."""
    name = f"reward/correlation/{signal}"
    values, errors = _values_in(last, name), _values_in(last, f"{name}_error")
    if not values:
        return 0.0, 0.0, 0
    return fmean(values), sum(error**2 for error in errors) ** 0.5 / len(errors), len(values)


def _pays(signal: str, last: Sequence[Line]) -> str:
    mean, error, num = _correlation(last, signal)
    if num < PAY_ITERATIONS or mean <= FOLLOWS + PAY_ERRORS * error:
        return ""
    return (
        f"within groups the reward follows the pictures' {signal} (reward/correlation/{signal} "
        f"{mean:.2f} on average of {num} iterations): the judge pays for it, whatever the "
        "instruction says"
    )


def _growth(growth: Growth, first: Sequence[Line], last: Sequence[Line]) -> str:
    before, after = _values_in(first, growth.metric), _values_in(last[-RECENT:], growth.metric)
    if len(before) < FIRST or len(after) < RECENT:
        return ""
    start, now = fmean(before), fmean(after)
    variances = [np.var(values, ddof=1) / len(values) for values in (before, after)]
    error = float(sum(variances)) ** 0.5
    noise = student(NUM_ERRORS, len(before) + len(after) - 2) * error
    if now - start <= max(noise, growth.least, growth.least_share * start):
        return ""
    why = "look at them on the page; do they follow the instruction?"
    if growth.signal:
        mean, pay_error, _ = _correlation(last, growth.signal)
        if mean <= PAY_ERRORS * pay_error:
            return ""
        name = f"reward/correlation/{growth.signal}"
        why = f"the reward pays for it within groups ({name} {mean:+.2f}): {why}"
    return (
        f"{growth.what} ({growth.metric} {start:.3g} in the first {FIRST} iterations, {now:.3g} in "
        f"the last {RECENT}); {why}"
    )
