"""Progress of long work: '37 of 128 pictures, 2.1/s, 43 s left', live or as rare log lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

from rl.console import Console, duration
from rl.printing import wrapped
from rl.ranks import heartbeat

SILENT_S = 3.0
"""Work that takes no longer is not reported."""
LIVE_EVERY_S = 0.5
FIRST_LINE_S = 10.0
"""Time to the first line in a log; each further line comes at twice the elapsed time."""
MAX_BETWEEN_LINES_S = 600.0
_console: Console | None = None
_first_line_s: dict[tuple[str, str], float] = {}
"""(phase, unit) -> time to the first line of its next repetition: longer each time."""


@contextmanager
def shown_on(console: Console) -> Iterator[None]:
    """Within the context, progress goes to `console`; elsewhere, to standard error."""
    global _console
    previous, _console = _console, console
    try:
        yield
    finally:
        _console = previous


class Progress:
    """Counts `done` of `total`. Use it in the main thread only."""

    def __init__(self, unit: str, total: int, done: int = 0) -> None:
        """`unit`: the counted things, in the plural. `done`: the number done before; not part of
        the rate."""
        self.unit, self.total = unit, total
        self.done = self._done_before = done
        self._began_s = time.monotonic()
        self._look_s = self._began_s + SILENT_S
        self._phase = heartbeat.phase_names()
        self._first_line_s = self._line_s = _first_line_s.get((self._phase, unit), FIRST_LINE_S)
        self._has_line = self._is_live = False
        self._console = _console or Console(True, wrapped(sys.stderr))
        self._live_before = self._console.live_text

    def step(self, num: int = 1) -> None:
        self.at(self.done + num)

    def at(self, done: int) -> None:
        self.done = done
        if time.monotonic() >= self._look_s:
            self._report()

    def __str__(self) -> str:
        parts = [f"{self.done} of {self.total} {self.unit}"]
        rate = (self.done - self._done_before) / max(time.monotonic() - self._began_s, 1e-9)
        if rate > 0:
            per_s = f"{rate:.0f}/s" if rate >= 10 else f"{rate:.1f}/s"
            parts.append(per_s if rate >= 1 else f"{rate * 60:.1f}/min")
            if self.done < self.total:
                parts.append(f"{duration((self.total - self.done) / rate)} left")
        return ", ".join(parts)

    def _report(self) -> None:
        now_s = time.monotonic()
        self._look_s = now_s + LIVE_EVERY_S
        text = f"{self._phase}: {self}" if self._phase else str(self)
        if heartbeat.is_loading():
            heartbeat.note_loading(text)
        elif self._console.live(text):
            self._is_live = True
        elif now_s - self._began_s >= self._line_s:
            while self._line_s <= now_s - self._began_s:
                self._line_s += min(self._line_s, MAX_BETWEEN_LINES_S)
            self._has_line = True
            self._console.say(f"  {text}" if self._phase else text)

    def end(self) -> None:
        """Clears the live line. Outside of phases, also logs a last line if a line was logged
        before."""
        heartbeat.note_loading("")
        if self._is_live:
            self._console.live(self._live_before)
        if self._has_line:
            _first_line_s[self._phase, self.unit] = min(2 * self._first_line_s, MAX_BETWEEN_LINES_S)
            if not self._phase:
                took = duration(time.monotonic() - self._began_s)
                self._console.say(f"{self.done} of {self.total} {self.unit} after {took}")


@contextmanager
def counted(unit: str, total: int, done: int = 0) -> Iterator[Progress]:
    """Reports progress while the block runs; the block calls `step` or `at`."""
    progress = Progress(unit, total, done)
    try:
        yield progress
    finally:
        progress.end()


@contextmanager
def weights_counted() -> Iterator[None]:
    """Within the context, `Progress` replaces transformers' weight-loading bars, not the hub's."""
    from transformers.utils import logging

    def hook(make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        bar = make(*args, **{**options, "disable": True})
        return each_weight(bar, len(args[0])) if args and isinstance(args[0], Sized) else bar

    def each_weight(weights: Any, total: int) -> Iterator[Any]:
        with counted("weights", total) as progress:
            for weight in weights:
                yield weight
                progress.step()

    previous = logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)
