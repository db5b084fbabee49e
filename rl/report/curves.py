"""Computes the points of a run's curves, and draws them as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from markupsafe import Markup, escape

from rl.report.reading import Record, number

SMOOTHING_ITERATIONS = 5
SMOOTHED_FROM = 50
"""A main line with more points is drawn smoothed, over its faint raw values."""
MAX_POINTS = 300
"""Maximum number of points of a drawn line; a longer one is averaged over equal spans."""
Points = list[tuple[float, float]]
"""(iteration, value)."""
_WIDTH, _HEIGHT = 440, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 8, 20
"""Margins of the chart, px, for the axis labels."""
_MAX_DOTS = 25


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
        "Second judge, on held-out prompts",
        (
            Line("eval/second_judge/reward", "reward"),
            Line("eval/judge_gap", "behind what the judge's gain predicts", "dash"),
        ),
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
            Line("thought/tokens_mean", "thought, mean", "dash"),
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


def smooth(values: Sequence[float]) -> list[float]:
    windows = (values[max(0, i + 1 - SMOOTHING_ITERATIONS) : i + 1] for i in range(len(values)))
    return [fmean(window) for window in windows]


def thinned(series: Points) -> tuple[Points, int]:
    """(at most `MAX_POINTS` points, number of points that each averages; the last is one point)."""
    if len(series) <= MAX_POINTS:
        return series, 1
    averaged = series[:-1]
    span_length = -(-len(averaged) // (MAX_POINTS - 1))
    spans = [averaged[i : i + span_length] for i in range(0, len(averaged), span_length)]
    means = [(fmean(x for x, _ in span), fmean(y for _, y in span)) for span in spans]
    return [*means, series[-1]], span_length


def how_drawn(lines: Sequence[tuple[Line, Points]]) -> str:
    """A note on how the page's chart averages these lines; '' if it does not."""
    notes = []
    if any(line.style == "main" and len(series) > SMOOTHED_FROM for line, series in lines):
        notes.append(f"strong: mean of the last {SMOOTHING_ITERATIONS} points, faint: each")
    span_length = max(thinned(series)[1] for _, series in lines)
    if span_length > 1:
        notes.append(f"a point is the mean of {span_length} iterations")
    return "; ".join(notes)


def drawn(curve: Curve, lines: Sequence[tuple[Line, Points]]) -> Markup:
    """The curve as SVG. `lines`: the lines that have points."""
    all_points = [point for _, series in lines for point in series]
    first, last = min(x for x, _ in all_points), max(x for x, _ in all_points)
    low = min(0.0, min(y for _, y in all_points))
    high = max(y for _, y in all_points) if curve.top is None else curve.top
    # Closer floats would have no tick between them.
    high = high if high - low > max(1e-100, 1e-9 * abs(low)) else low + max(1.0, abs(low))
    ticks = ticks_of(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first) if last > first else 0.5
        up = (y - low) / (high - low)
        inner_w, inner_h = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return round(_LEFT + across * inner_w, 1), round(_TOP + (1 - up) * inner_h, 1)

    spans = "; ".join(f"{line.label} from {p[0][1]:.3g} to {p[-1][1]:.3g}" for line, p in lines)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(f"{curve.title}: {spans}")}">'
    ]
    for tick in ticks:
        y = at(first, tick)[1]
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick y" x="{_LEFT - 6}" y="{y + 3.5}">{tick:g}</text>')
    for x, anchor in ((first, "start"), (last, "end")) if last > first else ((first, "middle"),):
        text_x = at(x, low)[0]
        parts.append(f'<text class="tick {anchor}" x="{text_x}" y="{_HEIGHT - 4}">{x:g}</text>')
    for line, series in lines:
        if len(series) > SMOOTHED_FROM and line.style == "main":
            parts.append(_path(series, "faint", at))
            means = smooth([y for _, y in series])
            series = [(x, mean) for (x, _), mean in zip(series, means, strict=True)]
        parts.append(_path(series, line.style, at))
        if len(series) <= _MAX_DOTS and line.style == "main":
            for x, y in (at(*point) for point in series):
                parts.append(f'<circle class="main" cx="{x}" cy="{y}" r="2.5"/>')
    # Contains only numbers, texts of this file, and text that is escaped above.
    return Markup("".join([*parts, "</svg>"]))  # nosec B704


def _path(series: Points, style: str, at: Callable[[float, float], tuple[float, float]]) -> str:
    pixels = (at(x, y) for x, y in thinned(series)[0])
    return f'<path class="{style}" d="M{"L".join(f"{x} {y}" for x, y in pixels)}"/>'


def ticks_of(low: float, high: float) -> list[float]:
    """Two to five round numbers that span [low, high]."""
    rough = (high - low) / 3
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    start, stop = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{step * number:.6g}") for number in range(start, stop + 1)]
