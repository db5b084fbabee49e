"""What trackers are sent, read from a run folder. Real TensorBoard files; trackio is a stand-in,
because the real one needs another Pillow."""

from __future__ import annotations

import errno
import math
import os
import sys
import threading
from argparse import Namespace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

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
from rl.files import read_rows
from rl.record.run_summary import LOCKS
from rl.run.follower import LOCK, Lines
from rl.tools.commands import follow
from rl.tools.commands.follow import (
    MAX_PICTURES,
    Followed,
    allowed_by_env,
    before_after,
    episode_table,
    row_from,
)
from rl.tools.notebook import LoadedRun
from rl.tools.page import Page
from rl.tools.reading import locked

FIRST = "episodes/it_000001.rank0.jsonl"


def sent(run_dir: Path, **tracking: Any) -> Followed:
    """Follows a run that has ended; returns what the views have done."""
    views = {"page": False, "images_per_iteration": 3, **tracking}
    followed = Followed(LoadedRun(run_dir), TrackingConfig.model_validate(views), None)
    follow.follow_all(followed)
    return followed


def events_of(run_dir: Path) -> EventAccumulator:
    keep_all = {"scalars": 0, "images": 0, "tensors": 0}
    return EventAccumulator(str(run_dir / "tensorboard"), size_guidance=keep_all).Reload()


def rewards_of(run_dir: Path) -> list[tuple[int, float]]:
    points = events_of(run_dir).Scalars("reward/mean")
    return [(point.step, point.value) for point in points]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def test_only_whole_lines_are_read_and_each_once(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    lines = Lines(file)
    assert lines.new() == []
    for text, expected in (("a\nb\nc", [b"a", b"b"]), ("", []), ("d\n", [b"cd"])):
        with file.open("a") as stream:
            stream.write(text)
        assert lines.new() == expected


def test_a_row_begins_with_the_main_metrics_and_a_damaged_one_is_left_out() -> None:
    row = row_from(b'{"iteration": 1, "loss/total": null, "reward/mean": 0.25}')
    assert row is not None and math.isnan(row.pop("loss/total"))
    assert list(row.items()) == [
        ("0_main/training_reward", 0.25),
        ("iteration", 1),
        ("reward/mean", 0.25),
    ]
    assert [row_from(line) for line in (b"", b"damaged", b'{"iteration": "x"}')] == [None] * 3


def test_the_table_has_the_first_rank_s_first_episodes(run_dir: Path) -> None:
    rows = read_rows(run_dir / FIRST)[0]
    write_lines(run_dir / "episodes/it_000001.rank1.jsonl", [row | {"rank": 1} for row in rows])
    Image.new("RGB", (800, 400), "red").save(run_dir / rows[0]["image_file"])
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
    assert episode_table(LoadedRun(run_dir), 5, 2) == [], "that iteration is not recorded"


def test_what_an_iteration_costs_does_not_grow_with_the_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of iterations with the files of many ranks, and few evaluations."""
    (run_dir / "episodes/it_000001.rank1.jsonl").mkdir()  # cannot be read
    listing = Mock()  # of folders of the whole run
    monkeypatch.setattr(Path, "glob", listing)
    for iteration in range(1, 4):
        assert len(episode_table(LoadedRun(run_dir), iteration, 9)) == 6
        assert before_after(LoadedRun(run_dir), iteration) == []
    listing.assert_not_called()


def test_each_of_several_sources_has_a_column(run_dir: Path) -> None:
    one, several = read_rows(run_dir / FIRST)[0][:2]
    several["other_source_files"] = [several["source_file"]] * 2
    write_lines(run_dir / FIRST, [one, several])
    table = episode_table(LoadedRun(run_dir), 1, 2)
    assert list(table[0])[:5] == ["source", "source 2", "source 3", "target", "rendered"]
    assert [[cell is not None for cell in list(row.values())[:4]] for row in table] == [
        [True, False, False, False],
        [True, True, True, False],
    ]


def test_a_picture_that_is_not_there_is_shown_small(run_dir: Path) -> None:
    row = read_rows(run_dir / FIRST)[0][0]
    (run_dir / row["image_file"]).unlink()
    sheet = run_dir / "thumbnails/it_000001/rank0_g00.webp"
    sheet.parent.mkdir(parents=True)
    Image.new("RGB", (64, 32), "red").save(sheet)
    row["thumbnail"] = f"{sheet.relative_to(run_dir)}#xywh=16,0,24,12"
    write_lines(run_dir / FIRST, [row])
    [shown] = episode_table(LoadedRun(run_dir), 1, 1)
    assert shown["rendered"].size == (24, 12)


def test_a_damaged_picture_is_left_out_and_the_rest_is_sent(run_dir: Path) -> None:
    """It is on the disk for good: every later start would stop there, too."""
    for file in ("images/it_000001/rank0_g00_m0.png", "evaluation/it_000004/0_image.png"):
        os.truncate(run_dir / file, 40)
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
    before, between, compared = (before_after(LoadedRun(tmp_path), i) for i in (0, 3, 4))
    assert before == between == [] and len(compared) == MAX_PICTURES
    caption, sheet = compared[1]
    assert caption == "ask 1 | before (0.25): write 1 | after (0.75): better"
    assert sheet.size == (3 * 256 + 2 * 8, 128), "gaps of 8 px"
    colours = [sheet.getpixel((128 + 264 * place, 64)) for place in range(3)]
    assert colours == [(0, 0, 255), (0, 0, 255), (255, 0, 0)], "source, before, after"


def test_without_a_first_evaluation_there_is_nothing_to_compare(tmp_path: Path) -> None:
    write_held_out(tmp_path, 4, [held_out(0, 1.0)])
    assert before_after(LoadedRun(tmp_path), 4) == []


def test_tensorboard_shows_scalars_pictures_and_the_config(run_dir: Path) -> None:
    assert sent(run_dir, tensorboard=True).complete == {"tensorboard"}
    assert rewards_of(run_dir) == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    events = events_of(run_dir)
    assert events.Scalars("0_main/training_reward")[0].value == 0.25
    [config] = events.Tensors("config/text_summary")
    assert '"run_name": "tiny"' in config.tensor_proto.string_val[0].decode()
    assert [(p.step, p.height) for p in events.Images("0_main/before_after/0")] == [(4, 16)]
    assert (run_dir / "tensorboard").stat().st_mode & 0o777 == 0o700, "it holds completions"


def test_tensorboard_shows_a_repeated_iteration_once(run_dir: Path) -> None:
    sent(run_dir, tensorboard=True)
    rows = [metrics(iteration) | {"reward/mean": float(iteration)} for iteration in range(6)]
    write_lines(run_dir / "metrics.jsonl", rows)
    sent(run_dir, tensorboard=True)
    assert rewards_of(run_dir) == [(i, float(i)) for i in range(6)]
    assert len(list((run_dir / "tensorboard").iterdir())) == 1


def test_a_view_does_not_write_through_a_link(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o755)
    (other / "events.out.tfevents.1").touch()
    (run_dir / "tensorboard").symlink_to(other)
    assert sent(run_dir, tensorboard=True).complete == set()
    assert holds(capfd.readouterr().err, "tensorboard stopped ... it is a link")
    assert [file.name for file in other.iterdir()] == ["events.out.tfevents.1"]
    assert other.stat().st_mode & 0o777 == 0o755


def test_a_view_that_fails_says_so_and_the_others_go_on(
    run_dir: Path, fake: _Trackio, capfd: pytest.CaptureFixture[str]
) -> None:
    fake.log.side_effect = OSError("disk\nfull")
    assert sent(run_dir, tensorboard=True, trackio=True).complete == {"tensorboard"}
    [line] = capfd.readouterr().err.splitlines()
    assert holds(line, f"WARNING: trackio ... OSError: disk full ... rl follow {run_dir}")
    assert len(rewards_of(run_dir)) == 4


def test_after_a_full_disk_the_page_goes_on_and_no_warning_is_lost(
    run_dir: Path, fake: _Trackio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of the follower is on the same disk as the run, which waits for room."""
    full = OSError(errno.ENOSPC, "no space")
    fake.log.side_effect = full
    said = Mock(side_effect=[full, None])
    monkeypatch.setattr(follow, "warn", said)
    failures, write = [full], Page.write

    def write_if_there_is_room(page: Page) -> Path:
        if failures:
            raise failures.pop()
        return write(page)

    monkeypatch.setattr(Page, "write", write_if_there_is_room)
    assert sent(run_dir, page=True, trackio=True).complete == {"page"}
    assert (run_dir / "report/index.html").is_file()
    warning = f"trackio stopped ... no space ... rl follow {run_dir} --trackio"
    assert said.call_count == 2 and holds(said.call_args, warning)


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("trackio", "trackio")]
)
def test_a_package_that_is_missing_is_a_warning(
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    module: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # so that an import raises
    assert sent(run_dir, **{name: True}).complete == set()
    [line] = capfd.readouterr().err.splitlines()
    assert f"WARNING: {name} stopped (" in line


class _Trackio(SimpleNamespace):
    """The interface of trackio 0.43; its rows remain after the end of a run."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.log = Mock(side_effect=lambda metrics, step: self.rows.append((step, metrics)))
        self.finish = Mock()
        self.init = Mock(side_effect=self._init)

    def _init(self, **arguments: Any) -> Any:
        next_step = max((step for step, _ in self.rows), default=-1) + 1
        return SimpleNamespace(_next_step=next_step, log=self.log, finish=self.finish)

    def Table(self, columns: list[str], data: list[list[Any]]) -> Any:
        return [dict(zip(columns, row, strict=True)) for row in data]

    def Image(self, value: Image.Image) -> Any:
        return ("picture", value.size)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> _Trackio:
    module = _Trackio()
    monkeypatch.setitem(sys.modules, "trackio", module)  # type: ignore[arg-type]
    monkeypatch.setenv("TRACKIO_DIR", "")
    return module


def test_trackio_stays_on_this_machine_whatever_the_environment_says(
    run_dir: Path, fake: _Trackio, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in follow.REDIRECTS:
        monkeypatch.setenv(name, "http://somewhere.invalid")
    sent(run_dir, trackio=True)
    assert (
        fake.init.call_args.kwargs.items()
        >= {
            "space_id": None,
            "resume": "allow",
            "auto_log_cpu": False,
            "auto_log_gpu": False,
        }.items()
    )
    assert not set(follow.REDIRECTS) & set(os.environ)
    assert os.environ["TRACKIO_DIR"] == str(run_dir / "trackio")
    fake.finish.assert_called_once()
    assert [step for step, _ in fake.rows] == [0, 1, 2, 3, 4]
    row = fake.rows[1][1]
    assert row["reward/mean"] == 0.25 and len(row["episodes"]) == 3
    assert row["episodes"][0]["rendered"] == ("picture", (16, 16))
    assert row["episodes"][0]["completion"].startswith("completion &#60;/script&#62;")
    sent(run_dir, trackio=True, trackio_space="me/mine")
    assert fake.init.call_args.kwargs.items() >= {"space_id": "me/mine", "private": True}.items()


def test_trackio_has_a_repeated_iteration_once(
    run_dir: Path, tmp_path: Path, fake: _Trackio
) -> None:
    (run_dir / "trackio").mkdir()
    (tmp_path / "snapshot").touch()
    (run_dir / "trackio/run.db").hardlink_to(tmp_path / "snapshot")
    sent(run_dir, trackio=True)
    assert (tmp_path / "snapshot").stat().st_nlink == 1
    write_episodes(run_dir, 5)
    write_lines(run_dir / "metrics.jsonl", map(metrics, range(6)))
    sent(run_dir, trackio=True)
    assert [step for step, _ in fake.rows] == list(range(6))
    assert "episodes" in fake.rows[5][1]


def test_a_service_that_hangs_holds_up_no_other_and_not_the_end(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(follow, "Trackio", lambda followed: threading.Event().wait())
    monkeypatch.setattr(follow, "LIMIT_S", 3.0)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=BytesIO()))
    views = TrackingConfig(trackio=True, tensorboard=True, page=False)
    followed = Followed(LoadedRun(run_dir), views, os.getpid())
    follow.follow_all(followed)
    assert followed.complete == {"tensorboard"} and followed.failed
    assert holds(capfd.readouterr().err, f"trackio: ... after 3 s; rl follow {run_dir}")


def test_a_view_has_one_process_and_another_may_be_added_to_a_run_that_goes_on(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The follower of a run writes its page by default."""
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
        ("online", None, "online"),
        ("online", "offline", "offline"),
        ("online", "disabled", "off"),
        ("offline", "online", "offline"),
        ("offline", "disabled", "off"),
    ],
)
def test_wandb_mode_can_only_lower_the_configured_mode(monkeypatch, configured, from_env, allowed):
    monkeypatch.setattr(os, "environ", {"WANDB_MODE": from_env} if from_env else {})
    assert allowed_by_env(configured) == allowed


def test_wandb_mode_that_turns_a_view_off_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    args = Namespace(wandb="offline", tensorboard=False, trackio=False, page=False)
    follow.wanted(LoadedRun(run_dir), args)
    assert holds(capfd.readouterr().err, "WANDB_MODE=disabled ... 'offline'")
