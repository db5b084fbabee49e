"""What a run prints: phases with their times, iterations, progress of long work."""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from rl.meter import seconds_between, time_mark
from rl.printing import guard, plain, wrapped
from rl.ranks import heartbeat

# ---- console -------------------------------------------------------------------------------------
# What a run prints: a line per phase, a summary line per iteration.

SUMMARY = {
    "reward/mean": "reward",
    "eval/reward": "held-out",
    "eval/gain_over_stock": "over stock",
    "drift/state_l2": "states moved",
    "kl/reference_k3": "kl",
    "optimizer/grad_norm": "grad",
    "memory/peak_gb": "peak GB",
    "renderer/pool_workers": "workers",
}
UNLESS_0 = {
    "status/ungraded": ("ungraded", ".1%"),
    "eval/ungraded": ("held-out ungraded", ".1%"),
    "renderer/pool_restarts": ("restarts", ".0f"),
}
"""Metrics that the summary line shows only if they are not 0, with label and format."""
_ETA_WINDOW = 20
"""Number of latest iterations that the time per iteration is averaged over."""
FIRST_LINE_S = 10.0
"""Time to the first line of long work in a log."""


def warn(text: str) -> None:
    """Print one line that begins with WARNING on stderr. The caller decides which rank warns."""
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Format as '8.2 s', '4 min 05 s' or '3 h 07 min'."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, remaining_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remaining_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class Console:
    """Prints for one process, with colours and live lines only if the stream is a terminal."""

    def __init__(self, enabled: bool, stream: TextIO | None = None) -> None:
        """`enabled`: whether anything is printed (rank 0). `stream`: default stdout."""
        self._rich = RichConsole(
            file=stream or wrapped(sys.stdout),
            quiet=not enabled,
            highlight=False,
            emoji=False,  # ':smile:' in a completion is text
            soft_wrap=True,
        )
        self._is_live = enabled and self._rich.is_interactive
        self._iteration_s: deque[float] = deque(maxlen=_ETA_WINDOW)

    def say(self, text: str) -> None:
        self._rich.print(plain(text), markup=False)

    @contextmanager
    def live(self, text: str) -> Iterator[Callable[[str], None]]:
        """While the block runs, a terminal has a line with `text`, below those of enclosing blocks.
        The yielded function replaces the text; in a log it prints the text `FIRST_LINE_S` after the
        beginning, and then each time that the elapsed time has doubled."""
        if not self._is_live:
            yield self._log_sometimes()
            return
        line = Spinner("dots", Text(plain(text)))
        # If stdout is a pipe, a program reads from it: do not redirect it.
        redirect = wrapped(sys.stdout).isatty()
        with Live(line, console=self._rich, transient=True, redirect_stdout=redirect):
            guard()  # rich has replaced the guarded streams
            yield lambda text: line.update(text=Text(plain(text)))

    def _log_sometimes(self) -> Callable[[str], None]:
        began_s, wait_s = time.monotonic(), FIRST_LINE_S

        def log(text: str) -> None:
            nonlocal wait_s
            spent_s = time.monotonic() - began_s
            if spent_s >= wait_s:
                wait_s = 2 * spent_s
                self.say(f"  {text}")

        return log

    def iteration(self, iteration: int, num_iterations: int, metrics: Mapping[str, float]) -> None:
        """The line of a finished iteration; `iteration` counts from 1."""
        parts = [f"[{iteration}/{num_iterations}]"]
        parts += [f"{SUMMARY[name]} {metrics[name]:.3g}" for name in SUMMARY if name in metrics]
        for name, (label, form) in UNLESS_0.items():
            parts += [f"{label} {value:{form}}"] if (value := metrics.get(name)) else []
        if metrics.get("drift/alarm"):
            parts.append("DRIFT")
        if metrics.get("optimizer/steps") == 0:
            parts.append("NO STEP")
        if "time/iteration_s" in metrics and iteration:  # 0: the first evaluation's time
            self._iteration_s.append(metrics["time/iteration_s"])
            mean_s = sum(self._iteration_s) / len(self._iteration_s)
            parts.append(f"{duration(mean_s)}/it")
            parts.append(f"ETA {duration(mean_s * (num_iterations - iteration))}")
        self._rich.print("  ".join(parts), markup=False, style="bold")


# ---- progress ------------------------------------------------------------------------------------
# Shows the progress of long work: '37 of 128 pictures'.

LOOK_EVERY_S = 0.5
_console: Console | None = None


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

    def __init__(self, unit: str, total: int, done: int, show: Callable[[str], None]) -> None:
        """`unit`: the counted things, in the plural. `done`: the number done before; not part of
        the rate. `show` gets the progress as text, about twice a second."""
        self.unit, self.total, self._show = unit, total, show
        self.done = self._done_before = done
        self._began_s = time.monotonic()
        self._look_s = self._began_s + LOOK_EVERY_S

    def step(self, num: int = 1) -> None:
        self.at(self.done + num)

    def at(self, done: int) -> None:
        self.done, now_s = done, time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + LOOK_EVERY_S
            text = f"{done} of {self.total} {self.unit}"
            if done > self._done_before:
                s_per_unit = (now_s - self._began_s) / (done - self._done_before)
                text += f", {duration(s_per_unit * (self.total - done))} left"
            self._show(text)


@contextmanager
def counted(unit: str, total: int, done: int = 0) -> Iterator[Progress]:
    """Reports progress while the block runs; the block calls `step` or `at`."""
    console = _console or Console(True, wrapped(sys.stderr))
    with console.live(unit) as show:
        yield Progress(unit, total, done, show)


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
    """A phase of this iteration."""

    seconds: float = 0.0
    text: str = ""

    def note(self, text: str) -> None:
        """Set the text printed beside the phase's seconds; a later call replaces it."""
        self.text = text


class PhaseTimer:
    """This rank's wall seconds per phase in this iteration. An inner phase pauses the outer one, so
    that phases add up to the wall time. Code that must count as one phase needs its own timer.

    On a GPU, a phase lasts from the moment in which the GPU has finished the work of the phase
    before until it has finished this phase's work: the host queues work far ahead. The host waits
    for these moments only when the iteration has ended."""

    def __init__(
        self, console: Console | None = None, flops_per_s: float | None = None, device: str = "cpu"
    ) -> None:
        """`console`: None prints nothing. `flops_per_s`: the matrix-product rate of `device`; if
        None, `work/mfu` is not reported."""
        self._console = console or Console(False)
        self._flops_per_s = flops_per_s
        self._device = device
        self.model_flops = 0.0
        """FLOPs of the policy's training passes since the last lap."""
        self._lap_s = time.perf_counter()
        self._marks = [("", time_mark(device))]
        """(the phase that ended or was paused, '' for none; when), as far as not yet counted; the
        first is when the one before it ended."""
        self._phases: defaultdict[str, Phase] = defaultdict(Phase)
        self._under_way: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Time a block; a phase entered several times in an iteration adds up."""
        self._charge()
        self._under_way.append(name)
        try:
            with heartbeat.phase(name), self._console.live(name):
                yield self._phases[name]
        finally:
            self._charge()
            self._under_way.pop()

    def _charge(self) -> None:
        """The time since the last call belongs to the innermost phase that is running."""
        name = self._under_way[-1] if self._under_way else ""
        self._marks.append((name, time_mark(self._device)))

    def _count(self) -> dict[str, Phase]:
        """Wait until the device has passed all marks; the phases since the last lap."""
        for (_, start), (name, end) in pairwise(self._marks):
            self._phases[name].seconds += seconds_between(start, end)
        del self._marks[:-1]
        return {name: phase for name, phase in self._phases.items() if name}

    def lap(self) -> dict[str, float]:
        """`time/<phase>_s` since the last lap, `time/iteration_s` and `work/mfu`; starts the next
        lap. Prints a line for each phase."""
        phases, now_s = self._count(), time.perf_counter()
        metrics = {}
        for name, phase in phases.items():
            metrics[f"time/{name}_s"] = phase.seconds
            line = f"  {name:<14} {duration(phase.seconds):>12}  {phase.text}"
            self._console.say(line.rstrip())
        metrics["time/iteration_s"] = iteration_s = now_s - self._lap_s
        if self._flops_per_s and self.model_flops:
            metrics["work/mfu"] = self.model_flops / (iteration_s * self._flops_per_s)
        self._phases.clear()
        self._lap_s, self.model_flops = now_s, 0.0
        return metrics
