"""Real TensorBoard files; trackio is a stand-in, because the real one needs another Pillow."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_messages import holds
from tiny_run import episode, run_config

from rl import trackers
from rl.config.schema import TrackingConfig
from rl.ranks.dist import Dist
from rl.record.run_record import RunRecord
from rl.trackers import BeforeAfter, Tracker, not_installed


def tracker(folder: Path, dist: Dist | None = None, **tracking: Any) -> Tracker:
    config = run_config(tracking={"images_per_iteration": 3, **tracking})
    dist = dist or Dist()
    return Tracker(folder / "run", config, dist, RunRecord(folder / "run", config, dist).config)


def read(folder: Path) -> EventAccumulator:
    keep_all = {"scalars": 0, "images": 0, "tensors": 0}
    events = EventAccumulator(str(folder / "run" / "tensorboard"), size_guidance=keep_all)
    events.Reload()
    return events


def text_of(events: EventAccumulator, name: str) -> str:
    return str(events.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode())


def test_tensorboard_shows_scalars_and_the_config(tmp_path: Path) -> None:
    page = tracker(tmp_path, tensorboard=True)
    page.log_episodes(1, [[episode()]], [[1.5]])  # has no table there
    page.log(1, {"reward/mean": 0.25, "eval/reward": float("nan")})
    page.close()
    events = read(tmp_path)
    [point] = events.Scalars("reward/mean")
    assert (point.step, point.value) == (1, 0.25)
    assert '"run_name": "tiny"' in text_of(events, "config")


def test_tensorboard_shows_pictures_before_and_after(tmp_path: Path) -> None:
    page = tracker(tmp_path, tensorboard=True)
    pictures = [("make it red", Image.new("RGB", (80, 32)))]
    page.log_before_after(lambda: BeforeAfter(4, pictures, {"learnt": "0.1 to 0.6"}))
    page.log(4, {"reward/mean": 0.25})
    page.close()
    events = read(tmp_path)
    assert [(p.step, p.width) for p in events.Images("0_main/before_after/0")] == [(4, 80)]
    assert text_of(events, "learnt") == "0.1 to 0.6"
    assert [point.value for point in events.Scalars("0_main/training_reward")] == [0.25]


def test_a_failed_comparison_does_not_end_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tracker(tmp_path, tensorboard=True)
    page.log_before_after(lambda: {}["records"])
    page.log(1, {"reward/mean": 0.25})
    page.close()
    assert "before and after failed" in capfd.readouterr().err
    assert len(read(tmp_path).Scalars("reward/mean")) == 1


def test_each_of_several_sources_has_a_column(tmp_path: Path) -> None:
    one_source = episode()
    three = replace(one_source.prompt.sample, sources=(Image.new("RGB", (8, 8)),) * 3)
    three_sources = replace(one_source, prompt=replace(one_source.prompt, sample=three))
    columns, rows = tracker(tmp_path)._table([(one_source, 1.0), (three_sources, 1.0)])
    assert columns[:5] == ["source", "source 2", "source 3", "target", "rendered"]
    assert [[cell is not None for cell in row[:3]] for row in rows] == [
        [True, False, False],
        [True, True, True],
    ]
    assert {len(row) for row in rows} == {len(columns)}


def test_tensorboard_shows_a_repeated_iteration_once(tmp_path: Path) -> None:
    for start, value in ((0, 1.0), (3, 2.0)):
        page = tracker(tmp_path, tensorboard=True)
        for iteration in range(start, 6):
            page.log(iteration, {"reward/mean": value})
        page.close()
    events = read(tmp_path)
    points = [(point.step, point.value) for point in events.Scalars("reward/mean")]
    assert points == [(i, 1.0 if i < 3 else 2.0) for i in range(6)]


@pytest.mark.parametrize(
    ("name", "value", "install"),
    [
        ("wandb", "online", "'vlm-edit-rl[train]'"),
        ("tensorboard", True, "'vlm-edit-rl[tensorboard]'"),
        ("trackio", True, "'vlm-edit-rl[trackio]' && pip install --no-deps trackio==0.43.0"),
    ],
)
def test_a_tracker_that_is_not_installed_is_a_problem_and_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    value: Any,
    install: str,
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # so that an import raises
    [problem] = not_installed(TrackingConfig.model_validate({"wandb": "off", name: value}))
    assert holds(problem, f"tracking.{name}: ... pip install {install}")
    page = tracker(tmp_path, **{name: value})
    page.log(1, {"reward/mean": 0.25})
    page.close()
    [line] = capfd.readouterr().err.splitlines()
    assert f"WARNING: {name} " in line


def test_a_tracker_that_fails_is_dropped_and_the_other_continues(
    tmp_path: Path, fake: _Trackio, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tracker(tmp_path, tensorboard=True, trackio=True)
    fake.problem = OSError("disk full")
    for iteration in range(3):
        page.log(iteration, {"reward/mean": 0.5})
    page.close()
    assert capfd.readouterr().err.count("trackio log failed") == 1
    assert len(read(tmp_path).Scalars("reward/mean")) == 3


class _Trackio(SimpleNamespace):
    """The interface of trackio 0.43; its rows remain after the end of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.inits: list[dict[str, Any]] = []
        self.problem: Exception | None = None
        self.finished = 0

    def init(self, **arguments: Any) -> Any:
        self.inits.append(arguments)
        next_step = max((step for step, _ in self.rows), default=-1) + 1
        return SimpleNamespace(_next_step=next_step, log=self._log, finish=self._finish)

    def _log(self, metrics: Mapping[str, Any], step: int) -> None:
        if self.problem:
            raise self.problem
        self.rows.append((step, dict(metrics)))

    def _finish(self) -> None:
        self.finished += 1

    def Table(self, columns: list[str], data: list[list[Any]]) -> Any:
        return [dict(zip(columns, row, strict=True)) for row in data]

    def Image(self, value: Image.Image) -> Any:
        return ("picture", value.size)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Trackio]:
    module = _Trackio()
    monkeypatch.setitem(sys.modules, "trackio", module)  # type: ignore[arg-type]
    monkeypatch.setenv("TRACKIO_DIR", "")
    return module


def test_trackio_stays_on_this_machine_whatever_the_environment_says(
    tmp_path: Path,
    fake: _Trackio,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in trackers.REDIRECTS:
        monkeypatch.setenv(name, "http://somewhere.invalid")
    page = tracker(tmp_path, trackio=True)
    [arguments] = fake.inits
    assert (arguments["space_id"], arguments["resume"]) == (None, "allow")
    assert not arguments["auto_log_cpu"] and not arguments["auto_log_gpu"]
    assert not set(trackers.REDIRECTS) & set(os.environ)
    assert os.environ["TRACKIO_DIR"] == str(tmp_path / "run" / "trackio")
    assert capfd.readouterr().err.count("is ignored") == 4
    page.log_episodes(1, [[episode(failure="<b>")]], [[1.5]])
    assert fake.rows == [], "a table is logged with the scalars of its iteration"
    page.log(1, {"reward/mean": 0.25})
    page.close()
    assert fake.finished == 1
    [(step, row)] = fake.rows
    assert (step, row["reward/mean"]) == (1, 0.25)
    [line] = row["episodes"]
    assert line["rendered"] == ("picture", (48, 32)) and line["failure"] == "&#60;b&#62;"
    tracker(tmp_path, trackio=True, trackio_space="me/mine")
    assert fake.inits[1]["space_id"] == "me/mine" and fake.inits[1]["private"]


def test_trackio_has_a_repeated_iteration_once(tmp_path, fake: _Trackio) -> None:
    for start in (0, 3):
        page = tracker(tmp_path, trackio=True)
        for iteration in range(start, 6 + start):
            page.log_episodes(iteration, [[episode()]], [[1.0]])
            page.log(iteration, {"reward/mean": 1.0})
        page.close()
    assert [step for step, _ in fake.rows] == list(range(9))
    assert all("episodes" in row for _, row in fake.rows)
