"""Atomic writes: concurrent writers, the leftover of a kill, and rows nested too deeply."""

from __future__ import annotations

import json
import multiprocessing
import threading
from pathlib import Path

import pytest

from rl.files import MAX_NESTING, row_of, write_atomically

NUM_TIMES, NUM_BYTES = 60, 200_000


def write_often(path: Path, letter: str) -> None:
    for _ in range(NUM_TIMES):
        write_atomically(path, letter * NUM_BYTES)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [threading.Thread, multiprocessing.get_context("fork").Process])
def test_two_writers_of_one_file_leave_what_one_of_them_wrote(tmp_path: Path, kind: type) -> None:
    path = tmp_path / "file"
    write_atomically(path, "a" * NUM_BYTES)
    writers = [kind(target=write_often, args=(path, letter)) for letter in "abc"]
    for writer in writers:
        writer.start()
    contents = set()
    while any(writer.is_alive() for writer in writers):
        content = path.read_text()
        assert len(content) == NUM_BYTES
        contents.add("".join(sorted(set(content))))
    for writer in writers:
        writer.join()
        assert getattr(writer, "exitcode", 0) == 0
    assert contents <= {"a", "b", "c"} and names(tmp_path) == ["file"]


def test_the_leftover_of_a_kill_is_overwritten(tmp_path: Path) -> None:
    leftover = tmp_path / ".file.tmp"
    leftover.write_text("half of something longer")
    write_atomically(tmp_path / "file", "whole")
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "whole"


@pytest.mark.parametrize("levels", [MAX_NESTING + 1, 900, 100_000])
def test_a_row_that_is_nested_too_deeply_is_refused(levels: int) -> None:
    """Code that walks such a row recursively would fail, as the report page's settings did."""
    deep = b'{"a":' * levels + b"1" + b"}" * levels
    assert row_of(deep) is None
    assert row_of(b'{"a":' * MAX_NESTING + b"1" + b"}" * MAX_NESTING) is not None
    assert row_of(json.dumps({"many": [[1]] * 1000}).encode()) == {"many": [[1]] * 1000}
