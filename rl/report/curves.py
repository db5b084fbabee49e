"""Names a run's curves and computes their points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

from rl.report.reading import Record, number
from rl.run.metric_table import doc_of

MAX_POINTS = 400
"""Maximum number of points of a line; a longer one is averaged over equal spans."""
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
    """One chart with one to five lines."""

    title: str
    lines: Sequence[Line]
    top: float | None = None
    """Upper end of the y axis; None = the largest value."""


CURVES = (
    Curve(
        "Held-out reward",
        (
            Line("eval/reward", "held-out prompts"),
            Line("eval/stock_reward", "the untrained system", "dash"),
            Line("eval/bare_reward", "the user's own words", "dot"),
            Line("eval_reference/reward", "given reference descriptions", "dashdot"),
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
        "KL to the start", (Line("kl/reference_k1", "k1", "dash"), Line("kl/reference_k3", "k3"))
    ),
    Curve("Entropy", (Line("policy/entropy", "per token"),)),
    Curve(
        "Completion length",
        (
            Line("tokens/completion_mean", "mean"),
            Line("tokens/completion_max", "longest", "dot"),
            Line("thought/tokens_mean", "thought, mean", "dash"),
        ),
    ),
    Curve("Mismatch of engine and trainer", (Line("mismatch/k3", "k3"),)),
    Curve(
        "Groups without spread of rewards",
        (Line("groups/zero_spread", "without spread"), Line("groups/dead", "dead", "dash")),
        1.0,
    ),
    Curve(
        "Not graded",
        (
            Line("status/ungraded", "ungraded"),
            Line("status/policy_failed", "policy failed", "dash"),
            Line("eval/ungraded", "held-out, ungraded", "dot"),
            Line("status/unreadable", "unreadable reply", "dashdot"),
        ),
    ),
    Curve(
        "Drift: reward that fixed prompts lost",
        (
            Line("drift/bare_fall", "the user's own words"),
            Line("drift/reference_fall", "reference descriptions", "dash"),
        ),
    ),
    Curve(
        "Pictures that equal their source",
        (
            Line("pictures/copies", "share"),
            Line("pictures/rewarded_copies", "with a reward of at least 0.5", "dash"),
        ),
    ),
    Curve("Similarity to the source", (Line("pictures/similarity", "mean"),)),
    Curve("Sharpness against the source", (Line("pictures/sharpness", "mean"),)),
    Curve("Saturation against the source", (Line("pictures/saturation", "mean"),)),
    Curve(
        "What the reward pays for (correlation within groups)",
        (
            Line("reward/correlation/similarity", "similarity"),
            Line("reward/correlation/sharpness", "sharpness", "dash"),
            Line("reward/correlation/saturation", "saturation", "dot"),
            Line("reward/correlation/length", "length", "dashdot"),
        ),
    ),
    Curve(
        "Share of the reward's variance in a group",
        (
            Line("reward/noise_variance_share", "rendering and judge"),
            Line("reward/judge_variance_share", "judge", "dash"),
        ),
        1.0,
    ),
    Curve(
        "Render pool",
        (
            Line("renderer/pool_workers", "workers that could draw"),
            Line("renderer/pool_queue", "batches that waited", "dash"),
            Line("renderer/pool_restarts", "workers lost", "dot"),
            Line("renderer/pool_remote_share", "share of the pictures", "dashdot"),
        ),
    ),
    Curve("Drift: how far states moved", (Line("drift/state_l2", "of their norm"),)),
    Curve("Distinct completions in a group", (Line("groups/distinct_completions", "share"),), 1.0),
)


def points(metrics: Sequence[Record], name: str) -> Points:
    """(iteration, value) of each row in which the metric `name` is a number."""
    return [
        (float(row["iteration"]), value)
        for row in metrics
        if (value := number(row.get(name))) is not None and number(row["iteration"]) is not None
    ]


def curve_data(metrics: Sequence[Record], num_pictures: int | None) -> dict[str, Any]:
    """All metrics of a run as columns, for the page's charts (`page/charts.js`), in at most
    `MAX_POINTS` rows; a longer run's are averaged over equal spans, except the first and the last.
    `num_pictures`: pictures per iteration, if known.

    `it`: iterations; `hours`: hours since the start; `pictures`: pictures drawn; `of`: metric ->
    value or None per row; `span`: iterations that a row averages; `docs`: metric -> (unit,
    meaning).
    """
    rows = [row for row in metrics if number(row["iteration"]) is not None]
    span = max(1, -(-(len(rows) - 2) // (MAX_POINTS - 2)))
    middle = [rows[i : i + span] for i in range(1, len(rows) - 1, span)]
    spans = [rows[:1], *middle, rows[-1:]] if len(rows) > 1 else [rows] * len(rows)
    iterations = [_short(fmean(float(row["iteration"]) for row in each)) for each in spans]
    seconds = [sum(number(row.get("time/iteration_s")) or 0.0 for row in each) for each in spans]
    names = sorted({name for row in rows for name in row} - {"iteration"})
    columns = {name: [mean(each, name) for each in spans] for name in names}
    documented = ((name, doc_of(name)) for name in names)
    return {
        "it": iterations,
        "hours": [_short(total / 3600) for total in accumulate(seconds)],
        "pictures": num_pictures and [it * num_pictures for it in iterations],
        "of": {name: column for name, column in columns.items() if set(column) != {None}},
        "span": span,
        "docs": {name: [doc.unit, doc.meaning] for name, doc in documented if doc},
    }


def mean(rows: Sequence[Record], name: str) -> float | None:
    """Mean of a metric in the rows that have it, to six digits; None if no row has it."""
    values = [value for row in rows if (value := number(row.get(name))) is not None]
    return _short(fmean(values)) if values else None


def _short(value: float) -> float:
    """Six significant digits; whole numbers as such, which take fewer characters."""
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
