"""What trackers are sent, read from a run folder. Real TensorBoard files; trackio is a stand-in,
because the real one needs another Pillow."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_messages import holds
from tiny_report import (
    EVIL,
    REWARDS,
    held_out,
    metrics,
    write_episodes,
    write_held_out,
    write_lines,
    write_run,
)

from rl.config.schema import TrackingConfig
from rl.record.run_summary import LOCKS
from rl.run.follower import LOCK, Lines
from rl.tools.commands import follow
from rl.tools.commands.follow import (
    MAX_PICTURES,
    Followed,
    Trackio,
    allowed_by_env,
    before_after,
    episode_table,
    row_from,
)
from rl.tools.notebook import LoadedRun
from rl.tools.report.page import Page
from rl.tools.report.reading import locked


def sent(run_dir: Path, **tracking: Any) -> Followed:
    """Follows a run that has ended; returns what the views have done."""
    views = {"page": False, "images_per_iteration": 3, **tracking}
    followed = Followed(LoadedRun(run_dir), TrackingConfig.model_validate(views), None)
    follow.follow_all(followed)
    return followed


def read(run_dir: Path) -> EventAccumulator:
    keep_all = {"scalars": 0, "images": 0, "tensors": 0}
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance=keep_all)
    events.Reload()
    return events


def text_of(events: EventAccumulator, name: str) -> str:
    return str(events.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode())


def test_only_whole_lines_are_read_and_each_once(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    lines = Lines(file)
    assert lines.new() == []
    file.write_text("a\nb\nc")
    assert lines.new() == [b"a", b"b"]
    assert lines.new() == []
    with file.open("a") as stream:
        stream.write("d\n")
    assert lines.new() == [b"cd"]


def test_a_row_begins_with_the_main_metrics_and_a_damaged_one_is_left_out() -> None:
    row = row_from(b'{"iteration": 1, "loss/total": null, "reward/mean": 0.25}')
    assert row is not None and math.isnan(row.pop("loss/total"))
    assert list(row.items()) == [
        ("0_main/training_reward", 0.25),
        ("iteration", 1),
        ("reward/mean", 0.25),
    ]
    assert [row_from(line) for line in (b"", b"damaged", b'{"iteration": "x"}')] == [None] * 3


def test_the_table_has_the_first_rank_s_first_episodes(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", num_iterations=1)
    of_first = run_dir / "episodes/it_000001.rank0.jsonl"
    rows = [json.loads(line) | {"rank": 1} for line in of_first.read_text().split("\n")[:-1]]
    write_lines(run_dir / "episodes/it_000001.rank1.jsonl", rows)
    Image.new("RGB", (800, 400), "red").save(run_dir / "images/it_000001/rank0_g00_m0.png")
    table = episode_table(LoadedRun(run_dir), 1, 9)
    columns = ["source", "target", "rendered", "instruction", "completion", "status", "failure"]
    columns += ["reward", EVIL, "viescore", "advantage"]
    assert [list(row) for row in table] == [columns] * 6
    first, last = list(table[0].values()), list(table[-1].values())
    assert first[0].size == (16, 16) and first[1] is None and first[2].size == (384, 192)
    assert first[3:7] == [f"instruction 0 {EVIL}", f"completion {EVIL}", "scored", None]
    assert first[7:] == [0.0, 1.0, 0.0, 0.5]
    assert last[6] == f"no_reply: {EVIL}" and last[7:] == [None, None, None, None]
    assert len(episode_table(LoadedRun(run_dir), 1, 2)) == 2
    assert episode_table(LoadedRun(run_dir), 2, 2) == [], "that iteration is not recorded"


def test_what_an_iteration_costs_does_not_grow_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of iterations with the files of many ranks, and few evaluations."""
    run_dir = write_run(tmp_path / "run")
    (run_dir / "episodes/it_000001.rank1.jsonl").mkdir()  # cannot be read
    listed: list[str] = []
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda at, name: (listed.append(name), glob(at, name))[1])
    for iteration in range(1, 4):
        assert len(episode_table(LoadedRun(run_dir), iteration, 9)) == 6
        assert before_after(LoadedRun(run_dir), iteration) == []
    assert listed == [], "folders of the whole run"


def test_each_of_several_sources_has_a_column(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", num_iterations=1)
    file = run_dir / "episodes/it_000001.rank0.jsonl"
    rows = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    rows[1]["other_source_files"] = [rows[1]["source_file"]] * 2
    write_lines(file, rows)
    table = episode_table(LoadedRun(run_dir), 1, 2)
    assert list(table[0])[:5] == ["source", "source 2", "source 3", "target", "rendered"]
    assert [[cell is not None for cell in list(row.values())[:4]] for row in table] == [
        [True, False, False, False],
        [True, True, True, False],
    ]


def test_a_picture_that_is_not_there_is_shown_small(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", num_iterations=1)
    file = run_dir / "episodes/it_000001.rank0.jsonl"
    rows = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    (run_dir / rows[0]["image_file"]).unlink()
    rows[0]["thumbnail"] = "thumbnails/it_000001/rank0_g00.webp#xywh=16,0,24,12"
    sheet = run_dir / "thumbnails/it_000001/rank0_g00.webp"
    sheet.parent.mkdir(parents=True)
    Image.new("RGB", (64, 32), "red").save(sheet)
    write_lines(file, rows)
    table = episode_table(LoadedRun(run_dir), 1, 1)
    assert table[0]["rendered"].size == (24, 12)


def test_a_damaged_picture_is_left_out_and_the_rest_is_sent(tmp_path: Path) -> None:
    """It is on the disk for good: every later start would stop there, too."""
    run_dir = write_run(tmp_path / "run")
    for file in ("images/it_000001/rank0_g00_m0.png", "evaluation/it_000004/0_image.png"):
        (run_dir / file).write_bytes((run_dir / file).read_bytes()[:40])
    table = episode_table(LoadedRun(run_dir), 1, 2)
    assert [row["rendered"] is None for row in table] == [True, False]
    assert len(before_after(LoadedRun(run_dir), 4)) == len(REWARDS[4]) - 1


def test_the_last_evaluation_is_compared_with_the_first(tmp_path: Path) -> None:
    old = [held_out(i, 0.25) for i in range(12)]
    new = [held_out(i, 0.25 + 0.5 * (i % 2), completion="better") for i in range(11)]
    new += [held_out(11, None), held_out(99, 1.0)]
    for iteration, rows, colour in ((0, old, "blue"), (4, new, "red")):
        folder = write_held_out(tmp_path, iteration, rows)
        for kind in ("source", "image"):
            Image.new("RGB", (512, 256), colour).save(folder / f"{kind}.png")
    compared = before_after(LoadedRun(tmp_path), 4)
    assert len(compared) == MAX_PICTURES
    caption, sheet = compared[1]
    assert caption == "ask 1 | before (0.25): write 1 | after (0.75): better"
    assert sheet.size == (3 * 256 + 2 * 8, 128), "gaps of 8 px"
    colours = [sheet.getpixel((128 + 264 * place, 64)) for place in range(3)]
    assert colours == [(0, 0, 255), (0, 0, 255), (255, 0, 0)], "source, before, after"
    assert before_after(LoadedRun(tmp_path), 0) == []
    assert before_after(LoadedRun(tmp_path), 3) == []


def test_without_a_first_evaluation_there_is_nothing_to_compare(tmp_path: Path) -> None:
    write_held_out(tmp_path, 4, [held_out(0, 1.0)])
    assert before_after(LoadedRun(tmp_path), 4) == []


def test_tensorboard_shows_scalars_pictures_and_the_config(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    assert sent(run_dir, tensorboard=True).complete == {"tensorboard"}
    events = read(run_dir)
    points = [(point.step, point.value) for point in events.Scalars("reward/mean")]
    assert points == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert events.Scalars("0_main/training_reward")[0].value == 0.25
    assert '"run_name": "tiny"' in text_of(events, "config")
    assert [(p.step, p.height) for p in events.Images("0_main/before_after/0")] == [(4, 16)]
    assert (run_dir / "tensorboard").stat().st_mode & 0o777 == 0o700, "it holds completions"


def test_tensorboard_shows_a_repeated_iteration_once(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    sent(run_dir, tensorboard=True)
    rows = [metrics(iteration) | {"reward/mean": float(iteration)} for iteration in range(6)]
    write_lines(run_dir / "metrics.jsonl", rows)
    sent(run_dir, tensorboard=True)
    points = [(point.step, point.value) for point in read(run_dir).Scalars("reward/mean")]
    assert points == [(i, float(i)) for i in range(6)]
    assert len(list((run_dir / "tensorboard").iterdir())) == 1


def test_a_view_does_not_write_through_a_link(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir, other = write_run(tmp_path / "run"), tmp_path / "other"
    other.mkdir(mode=0o755)
    (other / "events.out.tfevents.1").touch()
    (run_dir / "tensorboard").symlink_to(other)
    assert sent(run_dir, tensorboard=True).complete == set()
    assert holds(capfd.readouterr().err, "tensorboard stopped ... it is a link")
    assert [file.name for file in other.iterdir()] == ["events.out.tfevents.1"]
    assert other.stat().st_mode & 0o777 == 0o755


def test_a_view_that_fails_says_so_and_the_others_go_on(
    tmp_path: Path, fake: _Trackio, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run")
    fake.problem = OSError("disk\nfull")
    followed = sent(run_dir, tensorboard=True, trackio=True)
    assert followed.complete == {"tensorboard"}
    [line] = capfd.readouterr().err.splitlines()
    assert holds(line, f"WARNING: trackio ... OSError: disk full ... rl follow {run_dir}")
    assert len(read(run_dir).Scalars("reward/mean")) == 4


def test_after_a_full_disk_the_page_goes_on_and_no_warning_is_lost(
    tmp_path: Path, fake: _Trackio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of the follower is on the same disk as the run, which waits for room."""
    full, said = OSError(errno.ENOSPC, "no space"), list[str]()
    refusals = {"page": [full], "warn": [full]}

    def refuse(name: str) -> None:
        if refusals[name]:
            raise refusals[name].pop()

    real = Page.write
    monkeypatch.setattr(Page, "write", lambda page: (refuse("page"), real(page))[1])
    monkeypatch.setattr(follow, "warn", lambda line: (refuse("warn"), said.append(line)))
    fake.problem = full
    run_dir = write_run(tmp_path / "run")
    assert sent(run_dir, page=True, trackio=True).complete == {"page"}
    assert (run_dir / "report/index.html").is_file()
    [warning] = said
    assert holds(warning, f"trackio stopped ... no space ... rl follow {run_dir} --trackio")


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("trackio", "trackio")]
)
def test_a_package_that_is_missing_is_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    module: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # so that an import raises
    assert sent(write_run(tmp_path / "run"), **{name: True}).complete == set()
    [line] = capfd.readouterr().err.splitlines()
    assert f"WARNING: {name} stopped (" in line


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
    tmp_path: Path, fake: _Trackio, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in follow.REDIRECTS:
        monkeypatch.setenv(name, "http://somewhere.invalid")
    run_dir = write_run(tmp_path / "run")
    sent(run_dir, trackio=True)
    [arguments] = fake.inits
    assert (arguments["space_id"], arguments["resume"]) == (None, "allow")
    assert not arguments["auto_log_cpu"] and not arguments["auto_log_gpu"]
    assert not set(follow.REDIRECTS) & set(os.environ)
    assert os.environ["TRACKIO_DIR"] == str(run_dir / "trackio")
    assert fake.finished == 1
    assert [step for step, _ in fake.rows] == [0, 1, 2, 3, 4]
    row = fake.rows[1][1]
    assert row["reward/mean"] == 0.25 and len(row["episodes"]) == 3
    assert row["episodes"][0]["rendered"] == ("picture", (16, 16))
    assert row["episodes"][0]["completion"].startswith("completion &#60;/script&#62;")
    sent(run_dir, trackio=True, trackio_space="me/mine")
    assert fake.inits[1]["space_id"] == "me/mine" and fake.inits[1]["private"]


def test_trackio_has_a_repeated_iteration_once(tmp_path: Path, fake: _Trackio) -> None:
    run_dir = write_run(tmp_path / "run")
    (run_dir / "trackio").mkdir()
    (tmp_path / "snapshot").touch()
    (run_dir / "trackio/run.db").hardlink_to(tmp_path / "snapshot")
    sent(run_dir, trackio=True)
    assert (tmp_path / "snapshot").stat().st_nlink == 1
    write_episodes(run_dir, 5)
    write_lines(run_dir / "metrics.jsonl", [metrics(iteration) for iteration in range(6)])
    sent(run_dir, trackio=True)
    assert [step for step, _ in fake.rows] == list(range(6))
    assert "episodes" in fake.rows[5][1]


def test_a_service_that_hangs_holds_up_no_other_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Hangs(Trackio):
        def __init__(self, followed: Followed) -> None:
            threading.Event().wait()

    monkeypatch.setattr(follow, "Trackio", Hangs)
    monkeypatch.setattr(follow, "LIMIT_S", 3.0)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=SimpleNamespace(read=lambda: b"")))
    views = TrackingConfig(trackio=True, tensorboard=True, page=False)
    run_dir = write_run(tmp_path / "run")
    followed = Followed(LoadedRun(run_dir), views, os.getpid())
    follow.follow_all(followed)
    assert followed.complete == {"tensorboard"} and followed.failed
    warning = capfd.readouterr().err
    assert holds(warning, f"trackio: ... after 3 s; rl follow {run_dir}")


def test_a_view_has_one_process_and_another_may_be_added_to_a_run_that_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The follower of a run writes its page by default."""
    run_dir = write_run(tmp_path / "run")
    (run_dir / "logs").mkdir()
    with locked(run_dir / LOCK.format("page"), 0.0):
        assert sent(run_dir, page=True, tensorboard=True).complete == {"tensorboard"}
        with locked(run_dir / LOCKS[0], 0.0):
            assert sent(run_dir, page=True).complete == set(), "it does not wait for the run's end"
    errors = capfd.readouterr().err
    assert holds(errors, f"page stopped ... another process ... rl follow {run_dir} --page sends")
    assert not (run_dir / "report").exists()


@pytest.mark.parametrize(
    ("configured", "from_env", "allowed"),
    [
        ("online", "", "online"),
        ("online", "offline", "offline"),
        ("online", "disabled", "off"),
        ("offline", "online", "offline"),
        ("offline", "disabled", "off"),
    ],
)
def test_wandb_mode_can_only_lower_the_configured_mode(monkeypatch, configured, from_env, allowed):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if from_env:
        monkeypatch.setenv("WANDB_MODE", from_env)
    assert allowed_by_env(configured) == allowed


def test_wandb_mode_that_turns_a_view_off_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    args = Namespace(wandb="offline", tensorboard=False, trackio=False, page=False)
    follow.wanted(LoadedRun(write_run(tmp_path / "run")), args)
    assert holds(capfd.readouterr().err, "WANDB_MODE=disabled ... 'offline'")
