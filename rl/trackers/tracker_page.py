"""The interface of a tracker's page, and how its failures are caught."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeGuard

from PIL.Image import Image

from rl.console.console import warn
from rl.text.scrub import scrub

FINISH_TIMEOUT_S = 60.0
Cell = str | float | Image | None


class Table(NamedTuple):
    name: str
    iteration: int | None
    """None: of the whole run."""
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


class Page(ABC):
    """One run at one tracker. Any method may raise anything: the page is given up then."""

    name: ClassVar[str]

    @abstractmethod
    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Scalars under their stable names."""

    @abstractmethod
    def log_table(self, table: Table) -> None:
        """Rows of words, numbers and pictures, without keys."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """The run has ended; waits for a bounded time."""


class ServicePage(Page):
    """A page of wandb, or of trackio, which has its interface."""

    def __init__(self, module: Any, run: Any) -> None:
        self._module, self._run = module, run

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Any:
        cells = [[self._module.Image(c) if is_picture(c) else c for c in row] for row in rows]
        return self._module.Table(columns=list(columns), data=cells)

    def finish(self, failed: bool) -> None:
        """May take any time."""
        self._run.finish()

    def close(self, failed: bool) -> None:
        call_within(lambda: self.finish(failed), FINISH_TIMEOUT_S)


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


def call_within(call: Callable[[], object], seconds: float) -> None:
    """Run `call` in a daemon thread, abandoned when it takes longer (a name look-up takes no
    timeout). Raises what it raised, or TimeoutError."""
    outcome: list[Exception | None] = [TimeoutError(f"no answer in {seconds:g} s")]

    def run() -> None:
        try:
            call()
            outcome[0] = None
        except Exception as error:
            outcome[0] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if outcome[0] is not None:
        raise outcome[0]
