"""What is printed, made fit for a terminal in the one place that all of it passes.

What: `guard`, which every program of ours calls first: from then on whatever Python prints in the
process, by us, by a library's log or by a traceback, reaches the terminal and the logs without keys
and with the escape of whatever a terminal acts upon; `keep_going`, under which no line that is
printed ends the process. What not: colours and live lines, which only `console.py` draws, on the
stream beneath; what C libraries and child processes write.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TextIO

from rl.config.printing import printable
from rl.record.scrub import scrub


def guard() -> None:
    """Guard this process's standard output and error, for good; a second call changes nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Guarded):
            setattr(sys, name, Guarded(stream))


def keep_going() -> None:
    """From now on no line is worth the run: see `Lossy`. For a program whose output is no
    product, after `guard`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(beneath(stream), Lossy):
            setattr(sys, name, Lossy(beneath(stream)))
    guard()


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
    """A text stream that passes on `plain` text. It says that it is no terminal, so that libraries
    send it no commands either."""

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
    """A text stream whose text also goes to files (what C libraries write does not).

    No line is worth a run: text that a full disk, a closed pipe or an encoding refuses is lost, and
    nobody hears of it but the other places.
    """

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
