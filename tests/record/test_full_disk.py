"""On a really full disk, no file is torn and the run waits instead of failing."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import tiny_checkpoints
from tiny_checkpoints import checkpoints_in, names_in
from tiny_disk import contents, fill, mounted
from tiny_loop import rows_of
from tiny_messages import holds
from tiny_run import episode, record_in
from tiny_waits import wait_for

from rl.files import append_line, write_atomically
from rl.judge.http import ReplyJournal
from rl.ranks import signals
from rl.record import checkpoint
from rl.record.checkpoint import Checkpoints, problem_of
from rl.record.run_record import BackgroundWriter


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", 1024 * 1024) as folder:
        yield folder


def test_a_full_disk_tears_no_file_and_no_line(disk: Path) -> None:
    write_atomically(disk / "a.txt", "old")
    append_line(disk / "lines.jsonl", '{"a": 1}\n')
    fill(disk, left=8192)
    before = contents(disk)
    with pytest.raises(OSError, match=r"No space left.*a\.txt"):
        write_atomically(disk / "a.txt", "new" * 10_000)
    with pytest.raises(OSError, match=r"lines\.jsonl"):
        append_line(disk / "lines.jsonl", f'{{"a": "{"x" * 20_000}"}}\n')
    assert contents(disk) == before


def test_a_reply_that_cannot_be_stored_is_used_and_asked_again_after_a_restart(disk: Path) -> None:
    journal = ReplyJournal(disk / "replies.jsonl")
    journal.put("first", "a reply")
    filler = fill(disk)
    long = "x" * 5000
    assert journal.put("second", long) == long == journal.get("second")
    filler.unlink()
    journal.put("third", "a reply")
    journal.close()
    journal = ReplyJournal(disk / "replies.jsonl")
    replies = [journal.get(key) for key in ("first", "second", "third")]
    assert replies == ["a reply", None, "a reply"]
    assert len(rows_of(disk / "replies.jsonl")) == 2


point = partial(tiny_checkpoints.point, size=65_536)  # 256 KiB


def test_records_and_checkpoints_wait_for_disk_space_and_are_complete(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "TRY_EVERY_S", 0.05)
    run_dir = disk / "run"
    record, checkpoints = record_in(run_dir), checkpoints_in(run_dir)
    run_dir.mkdir()
    filler = fill(disk)
    printed: list[str] = []

    def is_printed(text: str) -> bool:
        printed.append(capsys.readouterr().err)
        return text in "".join(printed)

    with BackgroundWriter(run_dir) as writer, ExitStack() as stack:
        stack.callback(filler.unlink)  # also after a failure, so that the writer ends
        writer.put("the record", lambda: record.write_episodes(1, [[episode()]], [[1.0]]))
        writer.put("the checkpoint", lambda: checkpoints.save_alone(point(1)))
        writer.put("the metrics", lambda: record.write_metrics(1, {"a": 1.0}))
        wait_for(lambda: is_printed(f"{run_dir} has no room: the record waits"))
        os.truncate(filler, filler.stat().st_size - 128 * 1024)  # enough for the record only
        waits = f"{checkpoints.folder} has no room: checkpoint step_000001 waits"
        wait_for(lambda: is_printed(waits))
        assert not list(checkpoints.folder.glob("step_*"))
    assert problem_of(checkpoints.folder / "step_000001") is None
    [row] = rows_of(run_dir / "episodes/it_000001.rank0.jsonl")
    assert (run_dir / row["image_file"]).is_file()
    assert len(rows_of(run_dir / "metrics.jsonl")) == 1
    assert not [name for name in contents(run_dir) if "tmp" in name]


def test_a_stop_while_the_disk_is_full_keeps_the_older_checkpoints(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = checkpoints_in(disk / "run")
    assert checkpoints.save_alone(point(1)) is not None
    fill(disk)
    threading.Timer(0.3, lambda: monkeypatch.setitem(signals._received_s, 15, 1.0)).start()
    assert checkpoints.save_alone(point(2)) is None
    assert names_in(disk / "run") == ["step_000001"]
    assert holds(capsys.readouterr().err.splitlines()[-1], "checkpoint step_000002 ... make room")


def test_a_file_that_may_not_grow_is_waited_for_and_no_checkpoint_is_claimed(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setitem(signals._received_s, 15, 1.0)  # so that it does not wait
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # `ulimit -f`
        assert checkpoints.save_alone(point(1)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = capsys.readouterr().err
    assert holds(message, "step_000001 ... make room ... Newest complete checkpoint: none")
    assert not list(checkpoints.folder.iterdir())
