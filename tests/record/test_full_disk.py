"""On a really full disk, no file is torn and the run waits instead of failing."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tiny_disk import fill, mounted
from tiny_messages import holds
from tiny_run import episode, run_config

from rl.config.schema import CheckpointConfig
from rl.files import append_line, read_rows, write_atomically
from rl.judge.http import ReplyJournal
from rl.ranks import signals
from rl.ranks.dist import Dist
from rl.record import checkpoint
from rl.record.checkpoint import Checkpoints, ResumePoint, problem_of
from rl.record.run_record import BackgroundWriter, RunRecord

SIZE = 1024 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", SIZE) as folder:
        yield folder


def files(disk: Path) -> dict[str, bytes]:
    paths = (path for path in disk.rglob("*") if path.is_file() and path.name != "filler")
    return {path.relative_to(disk).as_posix(): path.read_bytes() for path in paths}


def test_a_full_disk_tears_no_file_and_no_line(disk: Path) -> None:
    write_atomically(disk / "a.txt", "old")
    append_line(disk / "lines.jsonl", '{"a": 1}\n')
    fill(disk, left=8192)
    before = files(disk)
    with pytest.raises(OSError, match=r"No space left.*a\.txt"):
        write_atomically(disk / "a.txt", "new" * 10_000)
    with pytest.raises(OSError, match=r"lines\.jsonl"):
        append_line(disk / "lines.jsonl", f'{{"a": "{"x" * 20_000}"}}\n')
    assert files(disk) == before


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
    rows, damaged = read_rows(disk / "replies.jsonl")
    assert (len(rows), damaged) == (2, [])


def write_model(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"w" * 100)


def point(iteration: int) -> ResumePoint:
    tensors = {"master/w": torch.arange(65_536.0)}  # 256 KiB
    rng = [{"torch": torch.zeros(16)}]
    return ResumePoint(iteration, tensors, {}, rng, write_model, "# A model")


def test_records_and_checkpoints_wait_for_disk_space_and_are_complete(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "TRY_EVERY_S", 0.05)
    run_dir = disk / "run"
    record = RunRecord(run_dir, run_config(), Dist())
    checkpoints = Checkpoints(run_dir, CheckpointConfig(), Dist())
    run_dir.mkdir()
    filler = fill(disk)
    stderr = ""

    def wait_for_message(text: str) -> None:
        nonlocal stderr
        end_s = time.monotonic() + 120
        while text not in stderr and time.monotonic() < end_s:
            time.sleep(0.02)
            stderr += capsys.readouterr().err
        assert text in stderr

    with BackgroundWriter(run_dir) as writer, ExitStack() as stack:
        stack.callback(filler.unlink)  # also after a failure, so that the writer ends
        writer.put("the record", lambda: record.write_episodes(1, [[episode()]], [[1.0]]))
        writer.put("the checkpoint", lambda: checkpoints.save_alone(point(1)))
        writer.put("the metrics", lambda: record.write_metrics(1, {"a": 1.0}))
        wait_for_message(f"{run_dir} has no room: the record waits")
        os.truncate(filler, filler.stat().st_size - 128 * 1024)  # enough for the record only
        checkpoint_dir = run_dir / "checkpoints"
        wait_for_message(f"{checkpoint_dir} has no room: checkpoint step_000001 waits")
        assert not list(checkpoint_dir.glob("step_*"))
    assert problem_of(run_dir / "checkpoints" / "step_000001") is None
    rows, damaged = read_rows(run_dir / "episodes" / "it_000001.rank0.jsonl")
    assert not damaged and (run_dir / rows[0]["image_file"]).is_file()
    assert len(read_rows(run_dir / "metrics.jsonl")[0]) == 1
    assert not [name for name in files(run_dir) if "tmp" in name]


def test_a_stop_while_the_disk_is_full_keeps_the_older_checkpoints(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = Checkpoints(disk / "run", CheckpointConfig(), Dist())
    assert checkpoints.save_alone(point(1)) is not None
    fill(disk)
    threading.Timer(0.3, lambda: monkeypatch.setitem(signals._received_s, 15, 1.0)).start()
    assert checkpoints.save_alone(point(2)) is None
    assert [path.name for path in (disk / "run/checkpoints").iterdir()] == ["step_000001"]
    message = capsys.readouterr().err.splitlines()[-1]
    assert holds(message, "checkpoint step_000002 ... make room")


def test_a_file_that_may_not_grow_is_waited_for_and_no_checkpoint_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), Dist())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setitem(signals._received_s, 15, 1.0)  # so that it does not wait
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # `ulimit -f`
        assert checkpoints.save_alone(point(1)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = capsys.readouterr().err
    assert holds(message, "step_000001 ... make room ... Newest complete checkpoint: none")
    assert not list((tmp_path / "checkpoints").iterdir())
