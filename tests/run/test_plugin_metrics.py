"""Metrics of third-party plugins are logged like the project's; a mistake in one ends no run."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import tiny_config
from tiny_loop import rows_of
from tiny_messages import holds

from rl import build
from rl.algorithm.metrics import Metrics
from rl.api.plugin import Resources
from rl.files import write_atomically
from rl.pool import pooled_renderer
from rl.progress import Console
from rl.ranks.dist import Dist
from rl.record.run_record import BackgroundWriter, RunRecord
from rl.rollout.stream import Rollout
from rl.run import metric_table
from rl.run.alarms import LEARNING, Watch
from rl.run.checks import Checks
from rl.run.metric_table import PluginMetrics
from rl.run.run import Recording, Run

PLUGINS = """
from rl.api.data import DataSource
from rl.api.metric import Metric
from rl.api.reward import Reward
from rl.api.types import Sample
from tiny_plugins.nothing import Nil


class Brush(Nil):
    metrics = {"strokes": Metric("strokes", "mean per picture | of the brush")}

    def take_metrics(self):
        return {"strokes": 2.0}


class Careful(Reward):
    metrics = {"hits": Metric("0..1", "share of pictures seen before")}
    report = {"hits": 0.5}

    def grade(self, reward_input):
        return 0.5

    def take_metrics(self):
        if isinstance(self.report, Exception):
            raise self.report
        return self.report


class Rows(DataSource):
    metrics = {"read_kb": Metric("kB", "read from disk, per row")}
    num_read = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.num_read += 1
        return Sample(str(index), "do nothing")

    def take_metrics(self):
        num_read, self.num_read = self.num_read, 0
        return {"read_kb": 1.5 * num_read} if num_read else {}
"""
NAMES = ["renderer/strokes", "reward/metric/mine/hits", "data/metric/train.0/read_kb"]


@dataclass
class Plugins:
    """Third-party plugins, resolved and built as by a run."""

    resolved: build.Resolved
    reward: Any
    rows: Any

    def metrics(self, dist: Dist) -> PluginMetrics:
        [reward], [source] = self.resolved.rewards.values(), self.resolved.train
        renderer = self.resolved.renderer
        return PluginMetrics(renderer, [(reward, self.reward), (source, self.rows)], dist)


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugins:
    write_atomically(tmp_path / "outsider/plugins.py", PLUGINS)
    changes = {
        "renderer": {"type": "outsider.plugins.Brush"},
        "rewards": {"mine": {"type": "outsider.plugins.Careful"}},
        "data": {"train": [{"type": "outsider.plugins.Rows"}]},
    }
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("outsider", "outsider.plugins"):
        sys.modules.pop(name, None)
    resolved = build.resolve(tiny_config.validated(tiny_config.nothing(tmp_path, **changes)))
    [reward], [rows] = resolved.rewards.values(), build.build_data(resolved, resolved.train)
    rows.take_metrics()  # building read the first row
    return Plugins(resolved, reward.cls(reward.config, Resources(None, "cpu")), rows)


def taken(plugin_metrics: PluginMetrics, **renderer_metrics: Any) -> dict[str, float]:
    return Dist().reduce(plugin_metrics.take(renderer_metrics))


def test_metrics_of_third_party_plugins_are_logged(plugins: Plugins, tmp_path: Path) -> None:
    config, dist, run_dir = plugins.resolved.config, Dist(), tmp_path / "run"
    record, mock = RunRecord(run_dir, config, dist), MagicMock()
    checks = Checks(config, dist, [], plugins.metrics(dist), Watch(LEARNING))
    _ = plugins.rows[0]
    run_dir.mkdir(exist_ok=True)
    line = dist.reduce(checks.metrics(Rollout([], [], {"strokes": 12.0})))
    checks.check_line(line)
    with BackgroundWriter(run_dir) as writer:
        Recording(Console(True), record, mock, writer, 3).write_line(1, line)
    [line] = rows_of(run_dir / "metrics.jsonl")
    assert [line[name] for name in NAMES] == [12.0, 0.5, 1.5]


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"hit": 1}, "'hit' ... metrics (hits)"),
        ({3: 1}, "reports 3"),
        ({"hits": "many"}, "'hits' ... 'many' (str) ... number"),
        ({"hits": float("nan")}, "'hits' ... nan"),
        ({"hits": float("-inf")}, "'hits' ... -inf"),
        ({"hits": 10**400}, "'hits' ... finite"),
        ([("hits", 1)], "take_metrics ... [('hits', 1)] (list) ... mapping"),
        (ValueError("no\nsuch"), "take_metrics ... ValueError: no such ("),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_metric_that_breaks_its_declaration_is_left_out_with_one_warning(
    plugins: Plugins, report: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins.reward.report = report
    metrics = plugins.metrics(Dist())
    assert taken(metrics, strokes=2) == taken(metrics, strokes=2) == {NAMES[0]: 2}
    [warning] = capsys.readouterr().err.splitlines()
    assert holds(warning, f"rank 0: rewards.mine: outsider.plugins.Careful ... {message}")
    plugins.reward.report = {"hits": 0.25}
    assert taken(metrics) == {NAMES[1]: 0.25}, "the plugin is asked again after a mistake"
    assert taken(metrics, blobs=1) == {NAMES[1]: 0.25}
    assert holds(
        capsys.readouterr().err, "renderer: outsider.plugins.Brush ... 'blobs' ... strokes"
    )


@pytest.mark.parametrize("held_out_only", [False, True])
def test_an_evaluation_reports_only_of_rewards_that_grade_nothing_else(
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    held_out_only: bool,
) -> None:
    """A plugin's error while its metrics of the evaluation are discarded is not a warning."""
    [(name, plugin)] = plugins.resolved.rewards.items()
    keys = plugin.keys.model_copy(update={"held_out_only": held_out_only})
    plugins.resolved.rewards[name] = replace(plugin, keys=keys)
    metrics = plugins.metrics(Dist())
    run: Any = MagicMock(checks=MagicMock(plugin_metrics=metrics))

    def found(report: object) -> dict[str, float]:
        def evaluate(*_: object) -> Metrics:
            _ = plugins.rows[0]
            plugins.reward.report = report
            return Metrics()

        monkeypatch.setattr("rl.run.run.evaluate", evaluate)
        return Dist().reduce(Run.evaluate_if_due(run, 1))

    assert found({"hits": 0.25}) == ({NAMES[1]: 0.25} if held_out_only else {})
    assert found(ValueError("not now")) == {}
    assert bool(capsys.readouterr().err) == held_out_only
    plugins.reward.report = {}
    assert taken(metrics) == {}


def test_every_metric_of_a_shipped_plugin_has_its_own_row() -> None:
    rows = metric_table.shipped_rows()
    assert "renderer/clip_cut_share" in rows and not rows.keys() & metric_table.METRICS.keys()
    of_a_pool = {f"renderer/{name}": metric for name, metric in pooled_renderer.METRICS.items()}
    assert of_a_pool.items() <= metric_table.METRICS.items()
