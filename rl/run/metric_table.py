"""The metrics that a run logs: their units and meanings; those that plugins report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl import build, printing
from rl.algorithm.metrics import Metrics
from rl.api import find
from rl.api.find import described
from rl.api.metric import Metric
from rl.api.plugin import PluginBase, brief, reported_by
from rl.build import Plugin, RewardPlugin
from rl.progress import warn

if TYPE_CHECKING:
    from rl.ranks.dist import Dist

# ---- plugin metrics ------------------------------------------------------------------------------
# Collects the metrics that plugins report.

_PREFIXES = {
    "rewards": "reward/metric/{name}/",
    "data": "data/metric/{name}/",
    "policy": "policy/metric/",
    "engine": "engine/",
    "renderer": "renderer/",
}
"""Config section -> prefix. It has 'metric' if the loop's own metrics have the same first word."""
Made = Sequence[tuple[Plugin[Any], PluginBase[Any]]]
"""Plugins of a config, each with its instance."""


def prefix_of(key: str) -> str:
    """A plugin's prefix by its config key: 'rewards.bright' -> 'reward/metric/bright/'."""
    section, _, name = key.partition(".")
    return _PREFIXES[section].format(name=name)


class PluginMetrics:
    """Collects what a run's plugins report in each iteration. A report that differs from the
    plugin's declaration is left out with one warning."""

    def __init__(self, renderer: Plugin[Any], made: Made, dist: Dist) -> None:
        """`made`: all plugins except the renderer, whose report comes with its pictures."""
        self._renderer = renderer
        self._made = made
        self._dist = dist
        self._warned: set[str] = set()

    def after_evaluation(self) -> Metrics:
        """This rank's metrics of rewards that grade held-out pictures only. The other plugins'
        reports belong to no training iteration, and are discarded."""
        metrics = Metrics()
        for plugin, instance in self._made:
            reported = reported_by(instance)
            if isinstance(plugin, RewardPlugin) and plugin.keys.held_out_only:
                self._add(metrics, plugin, reported)
        return metrics

    def take(self, of_renderer: Mapping[str, float] | Exception) -> Metrics:
        """This rank's plugin metrics; `of_renderer`: the renderer's report, or what it raised."""
        metrics = Metrics()
        self._add(metrics, self._renderer, of_renderer)
        for plugin, instance in self._made:
            self._add(metrics, plugin, reported_by(instance))
        return metrics

    def _add(
        self, metrics: Metrics, plugin: Plugin[Any], reported: Mapping[str, float] | Exception
    ) -> None:
        declared = plugin.cls.metrics
        if not isinstance(reported, Mapping):
            is_error = isinstance(reported, Exception)
            got = described(reported) if is_error else brief(reported)
            self._leave_out(
                plugin, "", f"take_metrics: {got}; expected a mapping of names to numbers"
            )
            return
        for name, value in reported.items():
            # Not NaN, not infinite, nor a whole number beyond floats.
            is_number = isinstance(value, Real) and -1e300 < value < 1e300
            if is_number and name in declared:
                metrics.add(f"{prefix_of(plugin.key)}{name}", float(value))
            else:
                expected = (
                    f"expected a finite number for one of its metrics ({', '.join(declared)})"
                )
                self._leave_out(plugin, name, f"reports {name!r}: {brief(value)}; {expected}")

    def _leave_out(self, plugin: Plugin[Any], name: str, problem: str) -> None:
        if (key := f"{plugin.key} {name}") not in self._warned:
            self._warned.add(key)
            where = f"rank {self._dist.rank}: {plugin.key}: {plugin.name}"
            warn(f"{where}: {problem}; left out (logged once)")


# ---- metric table --------------------------------------------------------------------------------
# Columns of `metrics.tsv`: name, unit, meaning. docs/metrics.md shows them.

_ROWS = Path(__file__).with_name("metrics.tsv").read_text(encoding="utf-8").strip().split("\n")
METRICS = {name: Metric(*rest) for name, *rest in (row.split("\t") for row in _ROWS)}
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
        for name in build.SHIPPED[kind]:
            plugin, _ = find.import_plugin(build.class_path(kind, name))
            for suffix, metric in plugin.metrics.items():
                rows[prefix_of(key) + suffix] = Metric(metric.unit, f"{name}: {metric.meaning}")
    return rows


if __name__ == "__main__":
    printing.guard()
    print(markdown_table(shipped_rows()), end="")
