"""What a run learnt, in numbers with intervals and in lines.

What: `compare` and `Change` (before and after on the same samples), `summary`, which the console
shows and the page too. What not: curves (`curves.py`), pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from rl.config.printing import printable
from rl.report.reading import Evaluation, Record, number

NUM_RESAMPLES = 10_000
INTERVAL = (
    "95 % bootstrap interval of the mean paired difference (percentiles of "
    f"{NUM_RESAMPLES:,} draws of the samples with replacement). It is too narrow where samples "
    "share a source picture or are few, and knows nothing of another seed of training."
)
"""What stands behind the dash of every interval here."""
_MAX_CELLS = 4_000_000
"""Of the table of draws x samples, at a time."""


@dataclass(frozen=True)
class Change:
    """Rewards before and after of the samples that were graded both times."""

    name: str
    rewards: Sequence[tuple[float, float]]

    @property
    def before(self) -> float:
        return fmean(old for old, _ in self.rewards)

    @property
    def after(self) -> float:
        return fmean(new for _, new in self.rewards)

    @property
    def gain(self) -> float:
        return self.after - self.before

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """See `INTERVAL`; None for a single sample."""
        return interval([new - old for old, new in self.rewards])

    def sentence(self, width: int) -> str:
        """One line: means, their difference with its interval, how many samples."""
        span = self.interval
        error = "" if span is None else f", 95 % {span[0]:+.3f} to {span[1]:+.3f}"
        return (
            f"  {self.name:{width}}  {self.before:.3f} -> {self.after:.3f}   "
            f"({self.gain:+.3f}{error}, {len(self.rewards)} samples)"
        )


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % percentile bootstrap interval of the mean, always the same draws; None for fewer than
    two values."""
    if len(values) < 2:
        return None
    array = np.asarray(values, dtype=np.float64)
    draw = np.random.default_rng(0)
    rows = max(1, _MAX_CELLS // len(array))
    means = [
        array[draw.integers(len(array), size=(min(rows, NUM_RESAMPLES - start), len(array)))].mean(
            1
        )
        for start in range(0, NUM_RESAMPLES, rows)
    ]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


def compare(before: Evaluation, after: Evaluation) -> list[Change]:
    """All samples first, then each category; only what was graded both times."""
    overall: list[tuple[float, float]] = []
    rewards: dict[str, list[tuple[float, float]]] = {}
    for identity, old in before.records.items():
        new = after.records.get(identity)
        if new is None:
            continue
        pair = number(old.get("reward")), number(new.get("reward"))
        if pair[0] is None or pair[1] is None:
            continue
        overall.append((pair[0], pair[1]))
        if category := old.get("category"):
            rewards.setdefault(str(category), []).append((pair[0], pair[1]))
    of_categories = [Change(printable(name), rewards[name]) for name in sorted(rewards)]
    return [Change("held-out reward", overall), *of_categories] if overall else []


def summary(metrics: Sequence[Record], evaluations: Sequence[Evaluation]) -> list[str]:
    """What was learnt, in lines."""
    if len(evaluations) < 2:
        lines = ["Fewer than two held-out evaluations: nothing to compare."]
    else:
        before, after = evaluations[0], evaluations[-1]
        changes = compare(before, after)
        width = max((len(change.name) for change in changes), default=0)
        span = f"(0 to 1; before training -> after {after.iteration} iterations)"
        lines = [f"What was learnt {span}", *(change.sentence(width) for change in changes)]
        num_graded = len(changes[0].rewards) if changes else 0
        if num_graded < len(before.records):
            lines.append(f"  left out: {len(before.records) - num_graded} not graded both times")
    return [*lines, *(f"  {line}" for line in beside(metrics))]


def beside(metrics: Sequence[Record]) -> list[str]:
    """What the gain has to be read beside: the right words, the user's own, the untrained system,
    what thinking is worth, and how far what the renderer reads has moved."""
    lines = []
    name = "eval_reference/reward"
    reference = [value for row in metrics if (value := number(row.get(name))) is not None]
    if len(reference) > 1:
        lines.append(
            f"the renderer, given the right words: {reference[0]:.3f} -> {reference[-1]:.3f}"
        )
    gains = _with(metrics, "eval/reward_gain")
    if len(gains) > 1:
        first, last = gains[0], gains[-1]
        lines.append(
            f"the user's own words, as they are: {_said(first, 'eval/bare_reward')}; gain "
            f"over them {_said(first, 'eval/reward_gain', '+.3f')} -> "
            f"{_said(last, 'eval/reward_gain', '+.3f')}"
        )
    return [*lines, *stock_lines(metrics), *thought_lines(metrics), *drift_lines(metrics)]


def stock_lines(metrics: Sequence[Record]) -> list[str]:
    """What was gained over the untrained system."""
    name = "eval/gain_over_stock"
    rows = _with(metrics, name)
    if not rows:
        return []
    upstream = number(rows[-1].get("eval/stock_upstream_reward"))
    beside = "" if upstream is None else f" ({upstream:.3f} as upstream calls its text encoder)"
    return [
        f"the untrained system on the user's words: {_said(rows[-1], 'eval/stock_reward')}{beside}"
        f"; gain over it {_gains(rows, name)}"
    ]


def thought_lines(metrics: Sequence[Record]) -> list[str]:
    """What thinking is worth, where that was measured (`evaluation.thought_gain`)."""
    name = "eval/gain_of_thought"
    rows = _with(metrics, name)
    if not rows:
        return []
    return [
        f"with the thought cut before it begins: {_said(rows[-1], 'eval/cut_thought_reward')}; "
        f"gain of thinking {_gains(rows, name)}"
    ]


def _gains(rows: Sequence[Record], name: str) -> str:
    """The first and the last, with their errors; one that was measured once alone."""
    ends = rows if len(rows) == 1 else (rows[0], rows[-1])
    return " -> ".join(f"{_said(row, name, '+.3f')}{_error(row, name)}" for row in ends)


def drift_lines(metrics: Sequence[Record]) -> list[str]:
    """How far training has moved what the renderer reads, where it reads what is trained."""
    rows = [row for row in metrics if row.get("drift/alarm") is not None]
    lines = []
    if alarmed := [str(row["iteration"]) for row in rows if row["drift/alarm"]]:
        lines.append(
            f"DRIFT: after {', '.join(alarmed)} iterations words that training does not change "
            "had lost more than noise"
        )
    for arm, words in (("bare", "the user's own words"), ("reference", "the right words")):
        name = f"drift/{arm}_fall"
        if rows and number(rows[-1].get(name)) is not None:
            lost = f"{_said(rows[-1], name, '+.3f')}{_error(rows[-1], name)}"
            lines.append(f"lost by {words} since training began: {lost}")
    moved = _with(metrics, "drift/state_l2")
    if moved:
        lines.append(
            "the states of the user's own words moved by "
            f"{_said(moved[-1], 'drift/state_l2', '.1%')} of their length "
            f"(cosine {_said(moved[-1], 'drift/state_cosine')})"
        )
    return lines


def _with(metrics: Sequence[Record], name: str) -> list[Record]:
    return [row for row in metrics if number(row.get(name)) is not None]


def _said(row: Record, name: str, spelt: str = ".3f") -> str:
    value = number(row.get(name))
    return "?" if value is None else format(value, spelt)


def _error(row: Record, name: str) -> str:
    """' +- 0.012', where a metric has a standard error."""
    error = number(row.get(f"{name}_error"))
    return "" if error is None else f" +- {error:.3f}"
