"""Progress of long work: '37 of 128 pictures, 2.1/s, 43 s left', live or as rare log lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

from rl.ranks import heartbeat, loading
from rl.record.console import Console, duration
from rl.record.terminal import beneath

T = TypeVar("T")

SILENT_S = 3.0
"""What takes no longer is not told."""
LIVE_EVERY_S = 0.5
FIRST_LINE_S = 10.0
"""In a log; each further line after twice as long as the one before."""
MAX_BETWEEN_LINES_S = 600.0
_console: Console | None = None
_first_line_s: dict[tuple[str, str], float] = {}
"""(phase, what) -> when the next of that kind has its first line; FIRST_LINE_S where not here."""


@contextmanager
def shown_on(console: Console) -> Iterator[None]:
    """Inside, what is counted in this process goes to `console`; elsewhere to standard error."""
    global _console
    before, _console = _console, console
    try:
        yield
    finally:
        _console = before


class Progress:
    """How many of how many. Belongs to the main thread."""

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        """`what`: are counted, in the plural; `done`: before this began, which says nothing of the
        rate."""
        self.what = what
        self.total = total
        self.done = self._done_before = done
        self._began_s = time.monotonic()
        self._look_s = self._began_s + SILENT_S
        self._kind = heartbeat.phase_names(), what
        self._first_line_s = self._line_s = _first_line_s.get(self._kind, FIRST_LINE_S)
        self._has_line = self._is_live = False
        self._console: Console | None = None

    def step(self, num: int = 1) -> None:
        """So many more are done."""
        self.at(self.done + num)

    def at(self, done: int) -> None:
        """So many are done."""
        self.done = done
        if time.monotonic() >= self._look_s:
            self._tell()

    def __str__(self) -> str:
        now_s = time.monotonic()
        parts = [f"{self.done} of {self.total} {self.what}"]
        rate = (self.done - self._done_before) / max(now_s - self._began_s, 1e-9)
        if rate > 0:
            parts.append(_rate(rate))
            if self.done < self.total:
                parts.append(f"{duration((self.total - self.done) / rate)} left")
        return ", ".join(parts)

    def _tell(self) -> None:
        now_s = time.monotonic()
        self._look_s = now_s + LIVE_EVERY_S
        if loading.is_told():
            loading.note(str(self))
            return
        if self._console is None:
            self._console = _console or Console(True, beneath(sys.stderr))
        self._is_live = self._console.live(str(self))
        if not self._is_live and now_s - self._began_s >= self._line_s:
            while self._line_s <= now_s - self._began_s:
                self._line_s += min(self._line_s, MAX_BETWEEN_LINES_S)
            self._has_line = True
            phase = self._kind[0]
            self._console.say(f"  {phase}: {self}" if phase else str(self))

    def end(self) -> None:
        """Nothing of it stays on a live line; who heard that it began hears how it ended, of a
        phase by the phase's own line."""
        loading.note("")
        if self._is_live and self._console is not None:
            self._console.live("")
        if self._has_line and self._console is not None:
            _first_line_s[self._kind] = min(2 * self._first_line_s, MAX_BETWEEN_LINES_S)
            if not self._kind[0]:
                took = duration(time.monotonic() - self._began_s)
                self._console.say(f"{self.done} of {self.total} {self.what} after {took}")


@contextmanager
def counted(what: str, total: int, done: int = 0) -> Iterator[Progress]:
    """Tell how far it is while the block runs, which calls `step` or `at`."""
    progress = Progress(what, total, done)
    try:
        yield progress
    finally:
        progress.end()


@contextmanager
def weights_counted() -> Iterator[None]:
    """Inside, transformers' bars of weights that load are ours; that of a download, which is the
    hub's own, stays."""
    from transformers.utils import logging

    def count(make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        bar = make(*args, **{**options, "disable": True})
        return _each(bar, len(args[0])) if args and isinstance(args[0], Sized) else bar

    previous = logging.set_tqdm_hook(count)
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)


def _each(weights: Iterable[T], total: int) -> Iterator[T]:
    with counted("weights", total) as progress:
        for weight in weights:
            yield weight
            progress.step()


def _rate(per_s: float) -> str:
    """'210/s', '2.1/s', '4.5/min'."""
    if per_s >= 10:
        return f"{per_s:.0f}/s"
    return f"{per_s:.1f}/s" if per_s >= 1 else f"{per_s * 60:.1f}/min"
