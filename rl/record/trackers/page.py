"""The interface of a tracker's page, and how its failures are caught."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeGuard

from PIL.Image import Image

from rl.record.console import warn
from rl.record.scrub import scrub

Cell = str | float | Image | None
"""Of a table."""


class Page(ABC):
    """Of one run at one tracker. Any method may raise anything: the page is given up then."""

    name: ClassVar[str]
    """Of the tracker, as warnings say it."""

    @abstractmethod
    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Scalars under their stable names."""

    @abstractmethod
    def log_table(
        self,
        name: str,
        iteration: int | None,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
    ) -> None:
        """Rows of words, numbers and pictures, without keys; `iteration` None: of the whole run."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """The run has ended; waits for a bounded time."""


def is_picture(cell: Cell) -> TypeGuard[Image]:
    return isinstance(cell, Image)


def tried(name: str, what: str, call: Callable[[], object]) -> bool:
    """Run `call`; a failure is one line. True when it went well."""
    try:
        call()
    except Exception as error:  # a tracker may fail in any way
        warn(scrub(f"{name} {what} failed, the run goes on: {error!r}"))
        return False
    return True


def call_within(call: Callable[[], object], seconds: float) -> str | None:
    """None when `call` returned in time, else what went wrong.

    A name look-up takes no timeout, so it gets a daemon thread, which may be abandoned.
    """
    outcome: list[str | None] = [f"no answer in {seconds:g} s"]

    def run() -> None:
        try:
            call()
            outcome[0] = None
        except Exception as error:
            outcome[0] = repr(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0]
