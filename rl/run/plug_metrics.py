"""Metrics that plugins report: their names, their rows, and collecting them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from typing import TYPE_CHECKING, Any

from rl.algorithm.metrics import Metrics
from rl.api.find import described
from rl.api.metric import Metric
from rl.api.plug import PlugBase, shown
from rl.build import Plug, Resolved
from rl.console.console import warn

if TYPE_CHECKING:
    from rl.ranks.dist import Dist

_PREFIXES = {
    "rewards": "reward/metric/{place}/",
    "data": "data/metric/{place}/",
    "policy": "policy/metric/",
    "engine": "engine/",
    "renderer": "renderer/",
}
"""Room -> prefix; 'metric' where the loop has metrics of its own under the same first word."""
Made = Sequence[tuple[Plug[Any], PlugBase[Any]]]
"""Plugins of a config, each with its instance."""


def prefix_of(key: str) -> str:
    """A plugin's prefix by its config key: 'rewards.bright' -> 'reward/metric/bright/'."""
    room, _, place = key.partition(".")
    return _PREFIXES[room].format(place=place)


def rows_of(resolved: Resolved) -> dict[str, Metric]:
    """Name in the run's metrics -> row, of all that the plugins of a run may report."""
    single: list[Plug[Any]] = [resolved.policy, resolved.engine, resolved.renderer]
    plugs = [*single, *resolved.rewards.values(), *resolved.train]
    return {
        prefix_of(plug.key) + name: Metric(metric.unit, f"{plug.name}: {metric.meaning}")
        for plug in plugs
        for name, metric in plug.cls.metrics.items()
    }


class PlugMetrics:
    """Collects what a run's plugins report, iteration by iteration."""

    def __init__(self, resolved: Resolved, made: Made, dist: Dist) -> None:
        """`made`: all plugins but the renderer, which reports with its pictures."""
        self.rows = rows_of(resolved)
        self._renderer = resolved.renderer
        self._made = made
        self._dist = dist
        self._is_first = True
        self._warned: set[str] = set()

    def drop(self) -> None:
        """Forget what there is to report: it was not for a training iteration."""
        for _, instance in self._made:
            with suppress(Exception):
                instance.take_metrics()

    def take(self, of_renderer: Mapping[str, float] | Exception) -> Metrics:
        """What this rank's plugins report, with what the renderer returned or raised. The first
        call, which is collective, raises ValueError on every rank for all that is not as declared;
        later calls, and always for values that are not finite, leave that out with one warning."""
        metrics = Metrics()

        def renderers() -> Mapping[str, float]:
            if isinstance(of_renderer, Exception):
                raise of_renderer
            return of_renderer

        wrong = self._add(metrics, self._renderer, renderers)
        for plug, instance in self._made:
            wrong |= self._add(metrics, plug, instance.take_metrics)
        if self._is_first:
            self._is_first = False
            refused = [text for rank in self._dist.gather([*wrong.values()]) for text in rank]
            if refused:
                raise ValueError("\n".join(dict.fromkeys(refused)))
        for metric, problem in wrong.items():
            self._leave_out(metric, problem)
        return metrics

    def _add(
        self, metrics: Metrics, plug: Plug[Any], take: Callable[[], Mapping[str, float]]
    ) -> dict[str, str]:
        """Adds what is as declared to `metrics`; returns name -> problem of the rest."""
        place, prefix = f"{plug.key}: {plug.name}", prefix_of(plug.key)
        try:
            reported = take()
        except Exception as error:
            why = described(error, plug.cls.take_metrics)
            return {prefix: f"{place}: take_metrics raises {why}"}
        if not isinstance(reported, Mapping):
            what = f"take_metrics returns {shown(reported)}; expected a mapping of names to numbers"
            return {prefix: f"{place}: {what}"}
        declared, wrong = plug.cls.metrics, {}
        for name, value in reported.items():
            metric = f"{prefix}{name}"
            if name not in declared:
                known = ", ".join(declared) or "none"
                wrong[metric] = f"{place} reports {name!r}: not among its metrics ({known})"
            elif not isinstance(value, Real):
                wrong[metric] = f"{place}: metric {name!r} is {shown(value)}; expected a number"
            elif not -1e300 < value < 1e300:  # nan, infinite, or a whole number beyond floats
                self._leave_out(metric, f"{place}: metric {name!r} is {value}")
            else:
                metrics.add(metric, float(value))
        return wrong

    def _leave_out(self, metric: str, problem: str) -> None:
        if metric not in self._warned:
            self._warned.add(metric)
            warn(f"rank {self._dist.rank}: {problem}; left out (said once)")
