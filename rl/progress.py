"""Times the phases of an iteration, and shows the progress of long work: '37 of 128 pictures'."""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rl.console import Console, duration
from rl.meter import has_passed, seconds_between, time_mark
from rl.printing import wrapped
from rl.ranks import heartbeat
from rl.ranks.dist import waited_s

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


# ---- phases --------------------------------------------------------------------------------------


@dataclass
class Phase:
    name: str
    console: Console | None
    text: str = ""

    def note(self, text: str) -> None:
        """Set the text printed beside the phase's seconds; a later call replaces it."""
        self.text = text
        self.show()

    def show(self) -> None:
        if self.console is not None:
            self.console.live(f"{self.name}: {self.text}" if self.text else self.name)


class PhaseTimer:
    """This rank's wall seconds per phase, in this iteration and in the whole run. An inner phase
    pauses the outer one, so that phases add up to the wall time. When the outermost phase ends, a
    line is printed for each. Code that must count as one phase needs its own timer.

    On a GPU, a phase lasts from the moment in which the GPU has finished the work of the phase
    before until it has finished this phase's work: the host queues work far ahead. The host waits
    for these moments in `lap` only; until the GPU has reached them, lines are not printed."""

    def __init__(
        self, console: Console | None = None, flops_per_s: float | None = None, device: str = "cpu"
    ) -> None:
        """`console`: None prints nothing. `flops_per_s`: the matrix-product rate of `device`; if
        None, `work/mfu` is not reported."""
        self._console = console
        self._flops_per_s = flops_per_s
        self._device = device
        self.model_flops = 0.0
        """FLOPs of the policy's training passes since the last lap."""
        self._start_s = self._lap_s = time.perf_counter()
        self._charged_waited_s = waited_s()
        self._marks = deque([("", time_mark(device))])
        """(the phase that ended or was paused, '' for none; when), as far as not yet counted; the
        first is when the one before it ended."""
        self._this_iteration: defaultdict[str, float] = defaultdict(float)
        self._waited: defaultdict[str, float] = defaultdict(float)
        """Seconds of this iteration in collectives, where faster ranks wait for slower ones."""
        self._unprinted: defaultdict[str, float] = defaultdict(float)
        self._notes: dict[str, str] = {}
        self._under_way: list[Phase] = []
        self.total: defaultdict[str, float] = defaultdict(float)
        """Seconds by phase since the start."""

    @property
    def wall_s(self) -> float:
        return time.perf_counter() - self._start_s

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Time a block; a phase entered several times in an iteration adds up."""
        self._charge()
        phase = Phase(name, self._console, self._notes.get(name, ""))
        self._under_way.append(phase)
        try:
            with heartbeat.phase(name):
                phase.show()
                yield phase
        finally:
            self._charge()
            self._under_way.pop()
            self._notes[name] = phase.text
            if self._under_way:
                self._under_way[-1].show()
            else:
                if self._console is not None:
                    self._console.live("")
                self._count()

    def _charge(self) -> None:
        """The time since the last call belongs to the innermost phase that is running."""
        name, now_waited_s = self._under_way[-1].name if self._under_way else "", waited_s()
        if name:
            self._waited[name] += now_waited_s - self._charged_waited_s
        self._marks.append((name, time_mark(self._device)))
        self._charged_waited_s = now_waited_s

    def _count(self, wait: bool = False) -> None:
        """Add up the time between the marks that the GPU has passed, or with `wait` between all.
        Print a line for each phase once no mark is left."""
        while len(self._marks) > 1 and (wait or has_passed(self._marks[1][1])):
            _, start = self._marks.popleft()
            name, end = self._marks[0]
            for totals in (self._this_iteration, self._unprinted, self.total) if name else ():
                totals[name] += seconds_between(start, end)
        if len(self._marks) == 1:
            unprinted, self._unprinted = self._unprinted, defaultdict(float)
            notes, self._notes = self._notes, {}
            if self._console is not None:
                for ended, seconds in unprinted.items():
                    line = f"  {ended:<14} {duration(seconds):>12}  {notes[ended]}"
                    self._console.say(line.rstrip())

    def own_seconds(self) -> dict[str, float]:
        """Seconds of each phase since the last lap, without waits for other ranks. No phase may be
        under way."""
        self._count(wait=True)
        return {name: s - self._waited[name] for name, s in self._this_iteration.items()}

    def lap(self) -> dict[str, float]:
        """`time/<phase>_s` since the last lap, `time/iteration_s` and `work/mfu`; starts the next
        lap."""
        self._count(wait=True)
        now_s = time.perf_counter()
        metrics = {f"time/{name}_s": seconds for name, seconds in self._this_iteration.items()}
        metrics["time/iteration_s"] = iteration_s = now_s - self._lap_s
        if self._flops_per_s and self.model_flops:
            metrics["work/mfu"] = self.model_flops / (iteration_s * self._flops_per_s)
        self._this_iteration, self._waited = defaultdict(float), defaultdict(float)
        self._lap_s, self.model_flops = now_s, 0.0
        return metrics
