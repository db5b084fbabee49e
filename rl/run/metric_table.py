"""The unit and meaning of every metric that a run may log, read from `docs/metrics.md`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path

from rl import build
from rl.api import find
from rl.api.metric import Metric
from rl.api.plugin import PluginBase
from rl.run.plugin_metrics import prefix_of
from rl.text import terminal

_IN_WHEEL = Path(__file__).with_name("metrics.md")
_FILE = _IN_WHEEL if _IN_WHEEL.is_file() else Path(__file__).parents[2] / "docs" / "metrics.md"
_OWN = _FILE.read_text(encoding="utf-8").partition("## What plugins report")[0]
METRICS = {
    name: Metric(unit, meaning.replace(r"\|", "|"))
    for name, unit, meaning in re.findall(r"(?m)^\| `(.+?)` \| (.+?) \| (.+) \|$", _OWN)
}
"""`<...>` in a name stands for words that the config or the data choose. Plugins' own metrics are
not among them."""
_PLACES = {
    "policies": "policy",
    "engines": "engine",
    "renderers": "renderer",
    "rewards": "rewards.<name>",
    "data": "data.train.<i>",
}
"""Room -> where a plugin of that room is named in a config."""


def doc_of(name: str) -> Metric | None:
    """The row that a logged name belongs to; an exact row wins over a pattern."""
    if name in METRICS:
        return METRICS[name]
    for pattern, metric in METRICS.items():
        literal_parts = map(re.escape, re.split(r"<[a-z_]+>", pattern))
        if "<" in pattern and re.fullmatch(".+".join(literal_parts), name):
            return metric
    return None


def markdown_table(rows: Mapping[str, Metric]) -> str:
    lines = ["| metric | unit | meaning |", "|---|---|---|"]
    for name, metric in rows.items():
        cells = (f"`{name}`", metric.unit, metric.meaning)
        lines.append(
            "| " + " | ".join(" ".join(c.replace("|", r"\|").split()) for c in cells) + " |"
        )
    return "\n".join(lines) + "\n"


def shipped_rows() -> dict[str, Metric]:
    """Rows of the shipped plugins' metrics."""
    rows: dict[str, Metric] = {}
    for room, place in _PLACES.items():
        for name in build.plugins_of(room):
            module = importlib.import_module(build.module_of(room, name))
            for cls in find.plugins_in(module, PluginBase):
                for own, metric in cls.metrics.items():
                    rows[prefix_of(place) + own] = Metric(metric.unit, f"{name}: {metric.meaning}")
    return rows


if __name__ == "__main__":
    terminal.guard()
    print(markdown_table(shipped_rows()), end="")
