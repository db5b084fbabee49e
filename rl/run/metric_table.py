"""The unit and meaning of every metric that a run may log, read from `docs/metrics.md`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from rl import build, printing
from rl.api import find
from rl.api.metric import Metric
from rl.run.plugin_metrics import prefix_of

_IN_WHEEL = Path(__file__).with_name("metrics.md")
_FILE = _IN_WHEEL if _IN_WHEEL.is_file() else Path(__file__).parents[2] / "docs" / "metrics.md"
_TABLES = _FILE.read_text(encoding="utf-8").partition("## What plugins report")[0]
METRICS = {
    name: Metric(unit, meaning.replace(r"\|", "|"))
    for name, unit, meaning in re.findall(r"(?m)^\| `(.+?)` \| (.+?) \| (.+) \|$", _TABLES)
}
"""`<...>` in a name is filled in from the config or the data. Plugins' metrics are not included."""
_CONFIG_KEYS = {
    "policies": "policy",
    "engines": "engine",
    "renderers": "renderer",
    "rewards": "rewards.<name>",
    "data": "data.train.<i>",
}
"""Kind of plugin -> the config key under which such a plugin is."""


def doc_of(name: str) -> Metric | None:
    """The row of a logged name; an exact row takes precedence over a pattern."""
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
    """The rows of the shipped plugins' metrics."""
    rows: dict[str, Metric] = {}
    for kind, key in _CONFIG_KEYS.items():
        for name in build.plugins_of(kind):
            plugin, _ = find.import_plugin(build.class_of(kind, name))
            for suffix, metric in plugin.metrics.items():
                rows[prefix_of(key) + suffix] = Metric(metric.unit, f"{name}: {metric.meaning}")
    return rows


if __name__ == "__main__":
    printing.guard()
    print(markdown_table(shipped_rows()), end="")
