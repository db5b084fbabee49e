"""What a run prints: phases, iterations, progress."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from rl.printing import guard, plain, wrapped

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
        parts += [f"{SUMMARY[name]} {metrics[name]:.4g}" for name in SUMMARY if name in metrics]
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
