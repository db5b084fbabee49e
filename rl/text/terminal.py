"""The one place that all of Python's output passes: without keys and without terminal commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TextIO

from rl.config.printing import printable
from rl.text.scrub import scrub


def guard(keeps_going: bool = False) -> None:
    """Guard standard output and error for good; every program calls it first. `keeps_going`: a line
    that cannot be printed ends nothing."""
    open_closed_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if keeps_going and not isinstance(beneath(stream), Lossy):
            setattr(sys, name, Guarded(Lossy(beneath(stream))))
        elif not isinstance(stream, Guarded):
            setattr(sys, name, Guarded(stream))


def open_closed_streams() -> None:
    """Standard streams that are closed (`>&-`, some daemons) become /dev/null, here and in child
    processes: files opened later would get their descriptors, and what C libraries print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free one
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode))  # noqa: SIM115 - until the end


def plain(text: str) -> str:
    """`text` without keys and terminal commands; its line ends and tabs stay."""
    return printable(scrub(text), but="\n\t")


def beneath(stream: TextIO) -> TextIO:
    return stream.beneath if isinstance(stream, Guarded) else stream


class _Stream:
    """A text stream over another one, `beneath`."""

    def __init__(self, stream: Any) -> None:
        self.beneath = stream

    def write(self, text: str) -> int:
        raise NotImplementedError

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)


class Guarded(_Stream):
    """Passes on `plain` text. To libraries it is no terminal: they send it no terminal commands."""

    def write(self, text: str) -> int:
        """A line that begins anew at the left, as progress bars do, may."""
        redrawn = "\r" if text.startswith("\r") else ""
        self.beneath.write(redrawn + plain(text[len(redrawn) :]))
        return len(text)

    def isatty(self) -> bool:
        return False


class Lossy(_Stream):
    """Writes to `files` too, and drops what a full disk, a closed pipe or an encoding refuses."""

    def __init__(self, stream: TextIO, *files: TextIO) -> None:
        super().__init__(stream)
        self._places = (*files, stream)

    def write(self, text: str) -> int:
        for place in self._places:
            with suppress(OSError, ValueError):  # closed, or a character that it cannot encode
                place.write(text)
        return len(text)

    def flush(self) -> None:
        for place in self._places:
            with suppress(OSError, ValueError):
                place.flush()
