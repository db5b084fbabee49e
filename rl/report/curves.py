"""The curves of a run, and their points; drawn by `figures.py` and, in the page, `svg.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rl.report.reading import Record, number

SMOOTHING_ITERATIONS = 5
SMOOTHED_FROM = 50
"""Points: a main line that has more is smoothed, and stands before itself as it is."""
MAX_POINTS = 300
"""Of a line on the page; more are averaged in equal spans."""
Points = list[tuple[float, float]]
"""(iteration, value)."""


@dataclass(frozen=True)
class Line:
    """One metric of a curve."""

    metric: str
    label: str
    style: str = "main"
    """'main', 'dash', 'dot' or 'dashdot'."""


@dataclass(frozen=True)
class Curve:
    """One picture with one to five lines."""

    title: str
    lines: Sequence[Line]
    top: float | None = None
    """Of the axis, where the metric has one."""


CURVES = (
    Curve(
        "Held-out reward",
        (
            Line("eval/reward", "held-out prompts"),
            Line("eval/stock_reward", "the untrained system", "dash"),
            Line("eval/bare_reward", "the user's own words", "dot"),
            Line("eval_reference/reward", "given the right words", "dashdot"),
        ),
        1.0,
    ),
    Curve(
        "Reward in training",
        (Line("reward/mean", "sampled"), Line("bare_reward", "the user's own words", "dot")),
        1.0,
    ),
    Curve("Gain over the untrained system", (Line("eval/gain_over_stock", "held-out prompts"),)),
    Curve("Gain of thinking", (Line("eval/gain_of_thought", "held-out prompts"),)),
    Curve(
        "KL to the start",
        (Line("kl/reference_k1", "k1", "dash"), Line("kl/reference_k3", "k3")),
    ),
    Curve("Entropy", (Line("policy/entropy", "per token"),)),
    Curve(
        "Completion length",
        (
            Line("tokens/completion_mean", "mean"),
            Line("tokens/completion_max", "longest", "dot"),
            Line("thought/tokens_mean", "of it thought, mean", "dash"),
        ),
    ),
    Curve(
        "Thoughts without words",
        (
            Line("thought/unfinished", "unfinished"),
            Line("thought/no_marker", "without the marker", "dash"),
        ),
    ),
    Curve("Mismatch of engine and trainer", (Line("mismatch/k3", "k3"),)),
    Curve(
        "Groups that teach nothing",
        (Line("groups/zero_spread", "without spread"), Line("groups/dead", "dead", "dash")),
        1.0,
    ),
    Curve(
        "Not graded",
        (
            Line("status/ungraded", "ungraded"),
            Line("status/policy_failed", "policy failed", "dash"),
            Line("eval/ungraded", "held-out, ungraded", "dot"),
        ),
    ),
    Curve(
        "Drift: what fixed words lost",
        (
            Line("drift/bare_fall", "the user's own words"),
            Line("drift/reference_fall", "the right words", "dash"),
        ),
    ),
    Curve("Drift: how far states moved", (Line("drift/state_l2", "of their length"),)),
    Curve("Distinct completions in a group", (Line("groups/distinct_completions", "share"),), 1.0),
)


def points(metrics: Sequence[Record], name: str) -> Points:
    """Of the iterations that have that number."""
    return [
        (float(row["iteration"]), value)
        for row in metrics
        if (value := number(row.get(name))) is not None and number(row["iteration"]) is not None
    ]


def smooth(values: Sequence[float]) -> list[float]:
    windows = (values[max(0, i + 1 - SMOOTHING_ITERATIONS) : i + 1] for i in range(len(values)))
    return [fmean(window) for window in windows]


def thinned(found: Points) -> tuple[Points, int]:
    """At most `MAX_POINTS`, and how many iterations each is the mean of; the last stays itself."""
    if len(found) <= MAX_POINTS:
        return found, 1
    rest = found[:-1]
    every = -(-len(rest) // (MAX_POINTS - 1))
    spans = [rest[start : start + every] for start in range(0, len(rest), every)]
    means = [(fmean(x for x, _ in span), fmean(y for _, y in span)) for span in spans]
    return [*means, found[-1]], every


def how_drawn(lines: Sequence[tuple[Line, Points]]) -> str:
    """What was averaged in the page's picture of them; '' for nothing."""
    said = []
    if any(line.style == "main" and len(found) > SMOOTHED_FROM for line, found in lines):
        said.append(f"strong: mean of the last {SMOOTHING_ITERATIONS} points, faint: each")
    every = max(thinned(found)[1] for _, found in lines)
    if every > 1:
        said.append(f"a point is the mean of {every} iterations")
    return "; ".join(said)
