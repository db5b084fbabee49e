"""The one place that all of Python's output passes: without keys and without terminal commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TextIO

from rl.config.printing import printable
from rl.record.scrub import scrub


def guard() -> None:
    """Guard this process's standard output and error, for good; every program of ours calls it
    first. A second call changes nothing."""
    open_closed_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, Guarded):
            setattr(sys, name, Guarded(stream))


def open_closed_streams() -> None:
    """Standard streams that are closed (`>&-`, some daemons) become /dev/null, here and in child
    processes; otherwise files that are opened later would get their descriptors, and with them what
    C libraries print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free one
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode))  # noqa: SIM115 - until the end


def keep_going() -> None:
    """From now on a line that cannot be printed ends nothing (`Lossy`). After `guard`."""
    for name in ("stdout", "stderr"):
        stream = beneath(getattr(sys, name))
        if not isinstance(stream, Lossy):
            setattr(sys, name, Guarded(Lossy(stream)))


def plain(text: str) -> str:
    """`text` without keys and terminal commands; its line ends and tabs stay."""
    return printable(scrub(text), but="\n\t")


def beneath(stream: TextIO) -> TextIO:
    """The stream itself, without a guard."""
    return stream.beneath if isinstance(stream, Guarded) else stream


def for_data() -> TextIO:
    """Standard output for rows that a program reads: as they are, except on a terminal."""
    stream = beneath(sys.stdout)
    return sys.stdout if stream.isatty() else stream


class Guarded:
    """A text stream that passes on `plain` text. It is no terminal to libraries, which then send no
    terminal commands."""

    def __init__(self, stream: TextIO) -> None:
        self.beneath = stream

    def write(self, text: str) -> int:
        """A line that begins anew at the left, as progress bars do, may."""
        redrawn = "\r" if text.startswith("\r") else ""
        self.beneath.write(redrawn + plain(text[len(redrawn) :]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)


class Lossy:
    """A text stream whose text also goes to files (what C libraries write does not). What a full
    disk, a closed pipe or an encoding refuses is dropped there without an error."""

    def __init__(self, stream: TextIO, *files: TextIO) -> None:
        self._stream, self._files = stream, files

    def write(self, text: str) -> int:
        for place in (*self._files, self._stream):
            with suppress(OSError, ValueError):  # closed, or a character that it cannot spell
                place.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        for place in (*self._files, self._stream):
            with suppress(OSError, ValueError):
                place.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
