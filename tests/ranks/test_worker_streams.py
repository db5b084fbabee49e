"""No line of a log ends a run, whatever becomes of where it goes."""

from __future__ import annotations

import errno
import io
import os
from typing import Any

import pytest

from rl.ranks.error_messages import REMEDIES, sentence
from rl.text.terminal import Lossy


class Failing(io.StringIO):
    """A stream on a full disk, a dead disk, or a pipe that nobody reads."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EIO, "Input/output error"),
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        ValueError("I/O operation on closed file"),
    ],
)
def test_what_one_place_refuses_reaches_the_other(error: Exception) -> None:
    for broken_first in (True, False):
        whole: Any = io.StringIO()
        broken: Any = Failing(error)
        copied: Any = Lossy(*((broken, whole) if broken_first else (whole, broken)))
        assert copied.write("a line\n") == 7
        copied.writelines(["b\n", "c\n"])
        print("d", file=copied, flush=True)
        assert whole.getvalue() == "a line\nb\nc\nd\n"


@pytest.mark.parametrize("number", REMEDIES)
def test_what_the_system_refuses_is_a_sentence(number: int) -> None:
    said = sentence(OSError(number, os.strerror(number), "/a/file\x1b[2J"))
    assert said is not None
    assert said.startswith(f"this run cannot go on:\n  /a/file\\x1b[2J: {os.strerror(number)}; ")
    assert sentence(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None, "may be a bug"
