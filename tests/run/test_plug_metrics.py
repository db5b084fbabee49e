"""What a stranger's plugs report of themselves is logged as ours is, and no mistake ends a run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import tiny_config
from tiny_messages import names
from tiny_ranks import run_ranks

from rl import build
from rl.algorithm.metrics import Metrics
from rl.api.metric import Metric
from rl.api.plug import Resources
from rl.config.schema import load_config
from rl.ranks.dist import Dist
from rl.record.console import Console, PhaseTimer
from rl.record.run_record import RunRecord
from rl.record.tracking import Tracker
from rl.record.writer import BackgroundWriter
from rl.rollout.stream import Rollout
from rl.run import metric_table
from rl.run.checks import Checks
from rl.run.plug_metrics import PlugMetrics
from rl.run.recording import Recording
from rl.run.run import Run
from rl.run.watch import Watch

STRANGER = """
from rl.api.data import DataSource
from rl.api.metric import Metric
from rl.api.reward import Reward
from rl.api.types import Sample
from tiny_plugs.nothing import Nil


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


def config_path(folder: Path) -> Path:
    (folder / "outsider").mkdir()
    (folder / "outsider" / "plugs.py").write_text(STRANGER)
    for name in ("outsider", "outsider.plugs"):
        sys.modules.pop(name, None)
    return tiny_config.write(
        folder,
        tiny_config.nothing(
            folder,
            renderer={"type": "outsider.plugs.Brush"},
            rewards={"mine": {"type": "outsider.plugs.Careful"}},
            data={"train": [{"type": "outsider.plugs.Rows"}]},
            tracking={"wandb": "offline"},
        ),
    )


@pytest.fixture
def resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> build.Resolved:
    monkeypatch.syspath_prepend(tmp_path)
    return build.resolve(load_config(config_path(tmp_path)))


def made_of(resolved: build.Resolved) -> list[tuple[build.Plug[Any], Any]]:
    [reward], [source] = resolved.rewards.values(), resolved.train
    [rows] = build.build_data(resolved, [source])
    rows.take_metrics()  # its first row was looked at
    return [(reward, reward.cls(reward.config, Resources(None, "cpu"))), (source, rows)]


def taken(plug_metrics: PlugMetrics, **of_renderer: Any) -> dict[str, float]:
    return Metrics.merge([plug_metrics.take(of_renderer).state()])


def test_a_strangers_metrics_are_in_the_lines_in_wandb_and_in_the_table(
    resolved: build.Resolved,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "run" / "wandb"))
    config, dist = resolved.config, Dist()
    made = made_of(resolved)
    record = RunRecord(tmp_path / "run", config, dist)
    tracker = Tracker(tmp_path / "run", config, dist, record.config)
    writer, rest = BackgroundWriter(tmp_path / "run"), MagicMock()
    watch = Watch(config, "float32", 0.0)
    checks = Checks(config, dist, None, [], PlugMetrics(resolved, made, dist), watch)
    console = Console(True)
    recording = Recording(dist, console, PhaseTimer(), rest, record, tracker, rest, writer, 3)
    assert tracker.mode == "offline"
    _ = made[1][1][0]
    record.run_dir.mkdir(exist_ok=True)
    line = recording.line(checks.metrics(Rollout([], [], {"strokes": 12.0})), {})
    checks.line(line, is_last=False)
    recording.write_line(1, line, was_evaluated=False)
    writer.flush()
    tracker.close()
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert [line[name] for name in NAMES] == [12.0, 0.5, 1.5]
    [uploaded] = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    assert all(name.encode() in uploaded.read_bytes() for name in NAMES)

    capsys.readouterr()
    metric_table.main([str(tmp_path / "run.jsonnet")])
    printed = capsys.readouterr().out
    for name, unit, meaning in (
        (NAMES[0], "strokes", "outsider.plugs.Brush: mean per picture \\| of the brush |"),
        (NAMES[1], "0..1", "outsider.plugs.Careful: share of pictures seen before |"),
        (NAMES[2], "kB", "outsider.plugs.Rows: read from disk, per row |"),
    ):
        assert f"| `{name}` | {unit} | {meaning}" in printed


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"hit": 1}, "'hit' ... metrics (hits)"),
        ({"a/b": 1}, "'a/b' ... metrics (hits)"),
        ({3: 1}, "reports 3"),
        ({"hits": "many"}, "'hits' ... 'many' (str) ... number"),
        ({"hits": None}, "'hits' ... None (NoneType) ... number"),
        ([("hits", 1)], "take_metrics ... [('hits', 1)] (list) ... mapping"),
        (ValueError("no\nsuch"), "take_metrics ... ValueError: no such ("),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_as_declared_is_refused_at_first_and_left_out_later(
    resolved: build.Resolved, report: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_of(resolved)
    made[0][1].report = report
    with pytest.raises(ValueError) as error:
        PlugMetrics(resolved, made, Dist()).take({})
    assert names(error.value, f"rewards.mine: outsider.plugs.Careful ... {message}")
    made[0][1].report = {"hits": 1}
    plug_metrics = PlugMetrics(resolved, made, Dist())
    assert taken(plug_metrics) == {"reward/metric/mine/hits": 1}
    made[0][1].report = report
    assert taken(plug_metrics, strokes=2) == taken(plug_metrics, strokes=2) == {NAMES[0]: 2}
    [warning] = capsys.readouterr().err.splitlines()
    assert names(warning, "rank 0: rewards.mine: outsider.plugs.Careful ... left out")


def test_a_renderer_is_held_to_the_same(resolved: build.Resolved) -> None:
    plug_metrics = PlugMetrics(resolved, made_of(resolved), Dist())
    with pytest.raises(ValueError, match=r"renderer: outsider.plugs.Brush .*'blobs'.*strokes"):
        plug_metrics.take({"blobs": 1.0})


@pytest.mark.parametrize(
    "value", [float("nan"), float("-inf"), 10**400], ids=["nan", "-inf", "huge"]
)
def test_a_value_that_is_not_finite_is_left_out_and_said_once(
    resolved: build.Resolved, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_of(resolved)
    made[0][1].report = {"hits": value}
    plug_metrics = PlugMetrics(resolved, made, Dist())
    assert taken(plug_metrics) == taken(plug_metrics) == {}
    [warning] = capsys.readouterr().err.splitlines()
    assert names(warning, "rewards.mine: outsider.plugs.Careful ... 'hits'")
    made[0][1].report = {"hits": 0.25}
    assert taken(plug_metrics) == {NAMES[1]: 0.25}, "it is asked again"


def test_what_was_not_for_an_iteration_is_forgotten(resolved: build.Resolved) -> None:
    made = made_of(resolved)
    source = made[1][1]
    plug_metrics = PlugMetrics(resolved, made, Dist())
    _ = source[0], source[1]
    made[0][1].report = ValueError("not now")
    plug_metrics.drop()
    made[0][1].report = {}
    assert taken(plug_metrics) == {}


def test_a_held_out_run_reports_nothing(resolved: build.Resolved, monkeypatch) -> None:
    made = made_of(resolved)
    run = Run.__new__(Run)
    run.config = resolved.config.model_copy(
        update={
            "evaluation": resolved.config.evaluation.model_copy(update={"every_n_iterations": 1})
        }
    )
    run.judge, run.held_out, run.num_iterations = None, [MagicMock()], 3
    run.context = run.engine = run.dist = run.timer = run.checkpointing = MagicMock()
    run.checks = MagicMock(plug_metrics=PlugMetrics(resolved, made, Dist()))

    def evaluate(*_: object) -> Metrics:
        _ = made[1][1][0]
        return Metrics()

    monkeypatch.setattr("rl.run.run.evaluate", evaluate)
    run.evaluate_if_due(1)
    assert NAMES[2] not in taken(run.checks.plug_metrics)


def ranks_report(folder: str, first: Any, second: Any) -> Any:
    sys.path.insert(0, folder)
    dist = Dist.from_env("cpu")
    resolved = build.resolve(load_config(str(Path(folder) / "run.jsonnet")))
    made = made_of(resolved)
    made[0][1].report = (first, second)[dist.rank]
    try:
        seen: Any = dist.reduce(PlugMetrics(resolved, made, dist).take({"strokes": 2 * dist.rank}))
    except ValueError as error:
        seen = str(error)
    dist.close()
    return seen


@pytest.mark.slow
def test_ranks_count_alike_and_refuse_together(tmp_path: Path) -> None:
    config_path(tmp_path)
    seen = run_ranks(ranks_report, 2, str(tmp_path), {"hits": 0.5}, {})
    assert seen == 2 * [{NAMES[0]: 1.0, NAMES[1]: 0.5}], "the mean over those that report"
    refused = run_ranks(ranks_report, 2, str(tmp_path), {}, {"hit": 1})
    assert len(set(refused)) == 1 and "reports 'hit'" in refused[0]


def test_every_shipped_plugs_metric_has_a_row_of_its_own() -> None:
    rows = metric_table.shipped_rows()
    assert "renderer/clip_cut_share" in rows and not rows.keys() & metric_table.METRICS.keys()
    known = {**metric_table.METRICS, "engine/mine": Metric("1", "mine")}
    metric_table.check_known(["engine/mine", *rows], known | rows)
