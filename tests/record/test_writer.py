"""What is written beside training is in order, bounded, complete, and loses no error."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rl.checkpoints import disk_room
from rl.files.atomic import append_line, write_atomically
from rl.ranks import heartbeat
from rl.record.writer import BackgroundWriter


def no_room(number: int = errno.ENOSPC) -> OSError:
    return OSError(number, os.strerror(number))


def test_jobs_are_done_in_order_in_another_thread_and_all_of_them(tmp_path: Path) -> None:
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


def test_who_brings_more_than_is_written_waits_and_hears_so_once(tmp_path, capsys) -> None:
    go_on = threading.Event()
    put: list[int] = []
    writer = BackgroundWriter(tmp_path, max_waiting=2)

    def bring() -> None:
        for number in range(6):
            writer.put("a job", go_on.wait)
            put.append(number)

    bringer = threading.Thread(target=bring)
    bringer.start()
    deadline_s = time.monotonic() + 120
    while len(put) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    time.sleep(0.1)
    assert put == [0, 1, 2], "one under way, two waiting"
    go_on.set()
    bringer.join(10)
    writer.__exit__(None, None, None)
    assert put == list(range(6))
    assert capsys.readouterr().err.count("slower than training") == 1


@pytest.mark.parametrize("meet", [BackgroundWriter.flush, lambda w: w.put("more", lambda: None)])
def test_an_error_is_raised_once_with_its_file_and_costs_no_other_job(
    tmp_path: Path, meet: Callable[[BackgroundWriter], None]
) -> None:
    (tmp_path / "taken").mkdir()
    later = tmp_path / "later.txt"
    writer = BackgroundWriter(tmp_path)
    writer.put("a file", lambda: write_atomically(tmp_path / "taken", "where a folder is"))
    writer.drain()
    with pytest.raises(IsADirectoryError, match="taken"):
        meet(writer)
    writer.put("a later one", lambda: write_atomically(later, "whole"))
    writer.flush()
    assert later.read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["later.txt", "taken"]


def test_what_ends_the_run_is_what_the_user_is_told(tmp_path, capsys) -> None:
    leaving = threading.Event()

    def fail() -> None:
        leaving.wait(10)
        raise no_room(errno.EIO)

    with pytest.raises(KeyError, match="bug"), BackgroundWriter(tmp_path) as writer:
        writer.put("first", fail)
        writer.put("last", lambda: append_line(tmp_path / "a", "b\n"))
        leaving.set()
        raise KeyError("bug")
    assert (tmp_path / "a").read_text() == "b\n", "all is written on the way out"
    assert "first could not be written: [Errno 5]" in capsys.readouterr().err
    with pytest.raises(OSError, match="Input/output"), BackgroundWriter(tmp_path) as writer:
        writer.put("the last of a run that ends well", fail)


def test_a_full_disk_is_waited_for_with_a_line_a_minute_and_is_no_hang(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(disk_room, "TRY_EVERY_S", 0.01)
    noted: list[float] = []
    monkeypatch.setattr(heartbeat, "note_wait", lambda: noted.append(time.monotonic()))
    errors = iter([no_room()] * 5)

    def write() -> str:
        if (error := next(errors, None)) is not None:
            raise error
        return "written"

    assert disk_room.when_there_is_room(write, tmp_path, "the file") == "written"
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "the file waits" in said[0]
    assert noted, "else `hang_limit_s` would end the run"


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (no_room(), True),
        (no_room(errno.EDQUOT), True),
        (no_room(errno.EIO), False),
        (RuntimeError("I/O error: No space left on device (os error 28)"), True),
        (RuntimeError("iteration 28"), False),
    ],
)
def test_a_full_disk_is_known_from_any_other_error(error: Exception, full: bool) -> None:
    assert disk_room.is_full(error) is full
    wrapped = ValueError("a library's")
    wrapped.__cause__ = error
    assert disk_room.is_full(wrapped) is full
