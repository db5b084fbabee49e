"""Curves as inline SVG, in the colours of the page (`page/page.css`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup, escape

from rl.report.curves import SMOOTHED_FROM, Curve, Line, Points, smooth, thinned

WIDTH, HEIGHT = 440, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 8, 20
"""Of the frame: room for numbers."""
_MAX_DOTS = 25


def drawn(curve: Curve, lines: Sequence[tuple[Line, Points]]) -> Markup:
    """`lines`: those that have points."""
    every = [point for _, found in lines for point in found]
    first, last = min(x for x, _ in every), max(x for x, _ in every)
    low = min(0.0, min(y for _, y in every))
    high = max(y for _, y in every) if curve.top is None else curve.top
    # Nearer together than this, and no number has room between them.
    high = high if high - low > max(1e-100, 1e-9 * abs(low)) else low + max(1.0, abs(low))
    ticks = ticks_of(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first) if last > first else 0.5
        up = (y - low) / (high - low)
        inner_w, inner_h = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
        return round(_LEFT + across * inner_w, 1), round(_TOP + (1 - up) * inner_h, 1)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(_in_words(curve, lines))}">'
    ]
    for tick in ticks:
        y = at(first, tick)[1]
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick y" x="{_LEFT - 6}" y="{y + 3.5}">{tick:g}</text>')
    for x, anchor in ((first, "start"), (last, "end")) if last > first else ((first, "middle"),):
        place = at(x, low)[0]
        parts.append(f'<text class="tick {anchor}" x="{place}" y="{HEIGHT - 4}">{x:g}</text>')
    for line, found in lines:
        if len(found) > SMOOTHED_FROM and line.style == "main":
            parts.append(_path(found, "faint", at))
            found = [(x, y) for (x, _), y in zip(found, smooth([y for _, y in found]), strict=True)]
        parts.append(_path(found, line.style, at))
        if len(found) <= _MAX_DOTS and line.style == "main":
            for x, y in (at(*point) for point in found):
                parts.append(f'<circle class="main" cx="{x}" cy="{y}" r="2.5"/>')
    # Numbers, and words of this file; what comes from a run is escaped above.
    return Markup("".join([*parts, "</svg>"]))  # nosec B704


def _path(found: Points, style: str, at: object) -> str:
    assert callable(at)
    places = (at(x, y) for x, y in thinned(found)[0])
    return f'<path class="{style}" d="M{"L".join(f"{x} {y}" for x, y in places)}"/>'


def _in_words(curve: Curve, lines: Sequence[tuple[Line, Points]]) -> str:
    said = (f"{line.label} from {p[0][1]:.3g} to {p[-1][1]:.3g}" for line, p in lines)
    return f"{curve.title}: {'; '.join(said)}"


def ticks_of(low: float, high: float) -> list[float]:
    """Two to five round numbers that span [low, high]."""
    rough = (high - low) / 3
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    start, stop = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{step * number:.6g}") for number in range(start, stop + 1)]
