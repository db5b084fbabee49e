"""The background writer: jobs run in order, none is lost, and errors are raised."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from tiny_waits import wait_for

from rl.files import append_line, write_atomically
from rl.ranks import heartbeat
from rl.record import checkpoint, run_record
from rl.record.run_record import BackgroundWriter


def disk_full(number: int = errno.ENOSPC) -> OSError:
    return OSError(number, os.strerror(number))


def test_all_jobs_are_done_in_order_in_one_other_thread(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    threads = set()

    def write(number: int) -> None:
        threads.add(threading.get_ident())
        append_line(path, f"{number}\n")

    with BackgroundWriter(tmp_path) as writer:
        for number in range(40):
            writer.put("a line", lambda number=number: write(number))
            if number == 20:
                writer.flush()
                assert len(path.read_text().split()) == 21
    assert path.read_text().split() == [str(number) for number in range(40)]
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_too_many_jobs_block_the_caller_with_a_warning(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(run_record, "SLOW_S", 0.01)
    go_on = threading.Event()
    accepted: list[int] = []
    writer = BackgroundWriter(tmp_path, max_waiting=2)

    def put_jobs() -> None:
        for number in range(6):
            writer.put("a job", go_on.wait)
            accepted.append(number)

    thread = threading.Thread(target=put_jobs)
    thread.start()
    wait_for(lambda: len(accepted) == 3)
    time.sleep(0.1)
    assert accepted == [0, 1, 2], "one is running, two are waiting"
    go_on.set()
    thread.join(10)
    writer.__exit__(None, None, None)
    assert accepted == list(range(6))
    assert "slower than training" in capsys.readouterr().err


@pytest.mark.parametrize("call", [BackgroundWriter.flush, lambda w: w.put("more", lambda: None)])
def test_an_error_is_raised_once_with_its_file_and_loses_no_other_job(
    tmp_path: Path, call: Callable[[BackgroundWriter], None]
) -> None:
    (tmp_path / "taken").mkdir()
    later = tmp_path / "later.txt"
    writer = BackgroundWriter(tmp_path)
    writer.put("a file", lambda: write_atomically(tmp_path / "taken", "where a folder is"))
    writer.drain()
    with pytest.raises(IsADirectoryError, match="taken"):
        call(writer)
    writer.put("a later one", lambda: write_atomically(later, "whole"))
    writer.flush()
    assert later.read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["later.txt", "taken"]


def test_a_job_that_raises_a_keyboard_interrupt_is_not_lost(tmp_path: Path) -> None:
    """A policy's `save_pretrained` may raise anything."""
    interrupt = Mock(side_effect=KeyboardInterrupt("of a plugin"))
    with pytest.raises(KeyboardInterrupt), BackgroundWriter(tmp_path) as writer:
        writer.put("the checkpoint", interrupt)
        writer.put("a later job", lambda: None)


def test_the_error_that_ends_the_run_is_raised_and_not_a_write_error(tmp_path, capsys) -> None:
    leaving = threading.Event()

    def fail() -> None:
        leaving.wait(10)
        raise disk_full(errno.EIO)

    with pytest.raises(KeyError, match="bug"), BackgroundWriter(tmp_path) as writer:
        writer.put("first", fail)
        writer.put("last", lambda: append_line(tmp_path / "a", "b\n"))
        leaving.set()
        raise KeyError("bug")
    assert (tmp_path / "a").read_text() == "b\n", "all jobs are done at the exit"
    assert "first could not be written: [Errno 5]" in capsys.readouterr().err
    with pytest.raises(OSError, match="Input/output"), BackgroundWriter(tmp_path) as writer:
        writer.put("the last of a run that ends well", fail)


def test_waiting_for_disk_space_gives_a_warning_and_is_no_hang(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(checkpoint, "TRY_EVERY_S", 0.01)
    waits: list[float] = []
    monkeypatch.setattr(heartbeat, "note_wait", lambda: waits.append(time.monotonic()))
    errors = iter([disk_full()] * 5)

    def write() -> str:
        if (error := next(errors, None)) is not None:
            raise error
        return "written"

    assert checkpoint.retry_until_space(write, tmp_path, "the file") == "written"
    [line] = capsys.readouterr().err.splitlines()
    assert "the file waits" in line
    assert waits, "so that `hang_limit_s` does not end the run"


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (disk_full(), True),
        (disk_full(errno.EDQUOT), True),
        (disk_full(errno.EFBIG), True),
        (disk_full(errno.EIO), False),
        (RuntimeError("I/O error: No space left on device (os error 28)"), True),
        (RuntimeError("I/O error: File too large (os error 27)"), True),
        (RuntimeError("iteration 28"), False),
    ],
)
def test_a_full_disk_is_distinguished_from_other_errors(error: Exception, full: bool) -> None:
    assert checkpoint.is_full(error) is full
    wrapped = ValueError("a library's")
    wrapped.__cause__ = error
    assert checkpoint.is_full(wrapped) is full
