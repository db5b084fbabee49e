"""Filters stdout and stderr of a program: no secrets, no terminal control sequences."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TextIO

from rl.config.printing import printable
from rl.text.scrub import scrub


def guard(keeps_going: bool = False) -> None:
    """Filter stdout and stderr from now on; every program calls this first. `keeps_going`: ignore
    errors of printing."""
    open_closed_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if keeps_going and not isinstance(wrapped(stream), Lossy):
            setattr(sys, name, Guarded(Lossy(wrapped(stream))))
        elif not isinstance(stream, Guarded):
            setattr(sys, name, Guarded(stream))


def open_closed_streams() -> None:
    """Open closed standard streams (`>&-`, some daemons) as /dev/null, here and in child processes.
    Otherwise files opened later get their descriptors, and C libraries print into these files."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode))  # noqa: SIM115 - open until the process ends


def plain(text: str) -> str:
    """`text` without secrets and terminal control sequences; newlines and tabs stay."""
    return printable(scrub(text), keep="\n\t")


def wrapped(stream: TextIO) -> TextIO:
    """The stream that a `Guarded` stream wraps; any other stream itself."""
    return stream.wrapped if isinstance(stream, Guarded) else stream


class _Stream:
    """A text stream that wraps the stream `wrapped`."""

    def __init__(self, stream: Any) -> None:
        self.wrapped = stream

    def write(self, text: str) -> int:
        raise NotImplementedError

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


class Guarded(_Stream):
    """Filters text with `plain`. `isatty` is False, so that libraries send no control codes."""

    def write(self, text: str) -> int:
        """Keeps a leading carriage return, with which progress bars redraw their line."""
        redrawn = "\r" if text.startswith("\r") else ""
        self.wrapped.write(redrawn + plain(text[len(redrawn) :]))
        return len(text)

    def isatty(self) -> bool:
        return False


class Lossy(_Stream):
    """Also writes to `files`. Drops text it cannot write (full disk, closed pipe, encoding)."""

    def __init__(self, stream: TextIO, *files: TextIO) -> None:
        super().__init__(stream)
        self._streams = (*files, stream)

    def write(self, text: str) -> int:
        for stream in self._streams:
            with suppress(OSError, ValueError):  # closed, or its encoding lacks a character
                stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            with suppress(OSError, ValueError):
                stream.flush()
