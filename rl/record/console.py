"""What a run prints: a line per phase, a summary line per iteration, where the time went."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.status import Status
from rich.table import Table
from rich.text import Text

from rl.ranks import heartbeat
from rl.ranks.dist import waited_s
from rl.record.terminal import beneath, guard, plain

SUMMARY = {
    "reward/mean": "reward",
    "eval/reward": "held-out",
    "eval/gain_over_stock": "over stock",
    "drift/state_l2": "states moved",
    "kl/reference_k3": "kl",
    "optimizer/grad_norm": "grad",
    "memory/peak_gb": "peak GB",
}
"""Metrics of the summary line and what they are called there; absent ones are left out."""
LOST = {"status/ungraded": "ungraded", "eval/ungraded": "held-out ungraded"}
"""Shares that the line shows where they are not 0."""
_ETA_WINDOW = 20
"""Iterations that the time per iteration is averaged over."""
_LOG_WIDTH = 80
"""Columns of a block of text where there is no terminal."""
_MAX_FRAME_WIDTH = 110
"""Longer lines are hard to read."""


def warn(text: str) -> None:
    """One loud line on stderr. Callers pick the rank."""
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """'8.2 s', '4 min 05 s', '3 h 07 min'."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class Console:
    """The run's face. Colours and live lines only where the stream is a terminal."""

    def __init__(self, enabled: bool, stream: TextIO | None = None) -> None:
        """`enabled`: rank 0. `stream`: default stdout."""
        self._rich = RichConsole(
            file=stream or beneath(sys.stdout),
            quiet=not enabled,
            highlight=False,
            emoji=False,  # ':smile:' in a completion is text
            soft_wrap=True,
        )
        self.enabled = enabled
        """Whether anything is printed."""
        self._live = enabled and self._rich.is_terminal
        self._status: Status | None = None
        """The live line of the phase under way."""
        self._own_line: Live | None = None
        """The live line of what is counted outside of any phase."""
        self._iteration_s: deque[float] = deque(maxlen=_ETA_WINDOW)

    def say(self, text: str) -> None:
        """One plain line."""
        self._rich.print(plain(text), markup=False)

    @contextmanager
    def status(self, text: str) -> Iterator[Status | None]:
        """A live line on a terminal while the block runs, else None."""
        if not self._live:
            yield None
            return
        with self._rich.status(text) as self._status:
            guard()  # rich has put streams of its own in the place of the guarded ones
            try:
                yield self._status
            finally:
                self._status = None

    def live(self, text: str) -> bool:
        """Put `text` on the line that is drawn anew, '' what else belongs there; False where there
        is no terminal."""
        if not self._live:
            return False
        if self._status is not None:
            words = ": ".join(filter(None, (heartbeat.phase_names(), text)))
            self._status.update(escape(plain(words)))
        elif text:
            if self._own_line is None:
                # Rows that a program reads stay where they go.
                redirect = beneath(sys.stdout).isatty()
                self._own_line = Live(
                    console=self._rich,
                    auto_refresh=False,
                    transient=True,
                    redirect_stdout=redirect,
                )
                self._own_line.start()
                guard()
            self._own_line.update(
                Text(plain(text), no_wrap=True, overflow="ellipsis"), refresh=True
            )
        elif self._own_line is not None:
            self._own_line.stop()
            self._own_line = None
        return True

    def phase(self, name: str, seconds: float, note: str) -> None:
        """The line of a finished phase."""
        self.say(f"  {name:<14} {duration(seconds):>12}  {note}".rstrip())

    def iteration(self, iteration: int, num_iterations: int, metrics: Mapping[str, float]) -> None:
        """The line of a finished iteration; `iteration` counts from 1."""
        parts = [f"[{iteration}/{num_iterations}]"]
        parts += [f"{SUMMARY[name]} {metrics[name]:.4g}" for name in SUMMARY if name in metrics]
        parts += [f"{LOST[name]} {metrics[name]:.1%}" for name in LOST if metrics.get(name)]
        parts += ["DRIFT"] * bool(metrics.get("drift/alarm"))
        parts += ["NO STEP"] * (metrics.get("optimizer/steps") == 0)
        if "time/iteration_s" in metrics:
            self._iteration_s.append(metrics["time/iteration_s"])
            mean_s = sum(self._iteration_s) / len(self._iteration_s)
            parts.append(f"{duration(mean_s)}/it")
            parts.append(f"ETA {duration(mean_s * (num_iterations - iteration))}")
        self._rich.print("  ".join(parts), markup=False, style="bold")

    def framed(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """A block of (label, text), texts wrapped beside their labels: in a frame on a terminal,
        else plain lines of at most 80 columns between two rules."""
        width = min(self._rich.width, _MAX_FRAME_WIDTH) if self._live else _LOG_WIDTH
        if not self._live:
            self.say(f"---- {title} ".ljust(width, "-"))
            for line in self._wrapped(rows, width):
                self.say(line.plain)
            self.say("-" * width)
            return
        body = Text("\n").join(self._wrapped(rows, width - 4))
        head = Text(plain(title))
        self._rich.print(Panel(body, title=head, title_align="left", width=width))

    def _wrapped(self, rows: Sequence[tuple[str, str]], width: int) -> list[Text]:
        """Lines of at most `width` columns; what has no label goes on under the text above it."""
        indent = max((len(label) for label, _ in rows), default=0) + 2
        lines = []
        for label, text in rows:
            pieces = Text(plain(text)).wrap(self._rich, width - indent)
            for number, piece in enumerate(pieces or [Text()]):
                piece.rstrip()
                head = (label if number == 0 else "").ljust(indent)
                lines.append(Text.assemble((head, "dim" if label[:1] == " " else "bold"), piece))
        return lines

    def where_time_went(self, timer: PhaseTimer) -> None:
        """The closing table: every phase's time on this rank, the longest first."""
        table = Table("phase", "time", "share of wall", title="where did the time go (rank 0)")
        for name, seconds, share in timer.closing_rows():
            table.add_row(name, duration(seconds), f"{share:.1%}")
        self._rich.print(table)


class ClosingRow(NamedTuple):
    """A row of the closing table."""

    phase: str
    time_s: float
    wall_share: float


@dataclass(frozen=True)
class Spent:
    """What a phase took."""

    seconds: float = 0.0
    waited_s: float = 0.0
    """Seconds of it spent in collectives, where faster ranks wait for slower ones."""

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.seconds + other.seconds, self.waited_s + other.waited_s)


@dataclass
class Phase:
    """A phase under way."""

    name: str
    text: str = ""
    status: Status | None = None
    """The live line, which a phase shares with those inside it."""

    def note(self, text: str) -> None:
        """What to show beside the seconds; the last call's text stays."""
        self.text = text
        self.show()

    def show(self) -> None:
        """Put this phase on the live line."""
        if self.status is not None:
            text = f"{self.name}: {self.text}" if self.text else self.name
            self.status.update(escape(plain(text)))


class PhaseTimer:
    """Wall seconds per phase, of this iteration and of the whole run, on this rank.

    A phase inside another pauses it: every second belongs to one phase, and they add up to the wall
    time. Lines are printed when the outermost phase ends: one per phase that ran in it, however
    often. Code that has phases of its own and shall count as one runs with `silent()`.
    """

    def __init__(self, console: Console | None = None, flops_per_s: float | None = None) -> None:
        """`console`: where lines go; None: nowhere. `flops_per_s`: the device's rate of matrix
        products; None: no utilisation is computed."""
        self._console = console
        self._flops_per_s = flops_per_s
        self.model_flops = 0.0
        """Operations of the policy's training passes since the last lap."""
        self._start_s = self._lap_s = self._settled_s = time.perf_counter()
        self._settled_waited_s = waited_s()
        self._this_iteration: dict[str, Spent] = {}
        self._unprinted: dict[str, Spent] = {}
        self._notes: dict[str, str] = {}
        self._under_way: list[Phase] = []
        self.total: dict[str, Spent] = {}
        """Since the start, by phase."""

    @property
    def wall_s(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._start_s

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Time a block; a phase entered several times in an iteration adds up."""
        with heartbeat.phase(name), self._live_line(name) as status:
            self._settle()
            phase = Phase(name, self._notes.get(name, ""), status)
            phase.show()
            self._under_way.append(phase)
            try:
                yield phase
            finally:
                self._settle()
                self._under_way.pop()
                self._notes[name] = phase.text
                if self._under_way:
                    self._under_way[-1].show()
                else:
                    unprinted, self._unprinted = self._unprinted, {}
                    notes, self._notes = self._notes, {}
        if self._console is not None and not self._under_way:
            for ended, spent in unprinted.items():
                self._console.phase(ended, spent.seconds, notes[ended])

    @contextmanager
    def _live_line(self, name: str) -> Iterator[Status | None]:
        """The outermost phase's, which ends with it; None where there is no terminal."""
        if self._under_way or self._console is None:
            yield self._under_way[0].status if self._under_way else None
            return
        with self._console.status(name) as status:
            yield status

    def _settle(self) -> None:
        """Book what was spent since the last settling on the innermost phase under way."""
        now_s, now_waited_s = time.perf_counter(), waited_s()
        if self._under_way:
            name = self._under_way[-1].name
            spent = Spent(now_s - self._settled_s, now_waited_s - self._settled_waited_s)
            for totals in (self._this_iteration, self._unprinted, self.total):
                totals[name] = totals.get(name, Spent()) + spent
        self._settled_s, self._settled_waited_s = now_s, now_waited_s

    def silent(self) -> PhaseTimer:
        """A timer for code that runs inside a phase: it prints nothing and counts nowhere."""
        return PhaseTimer()

    def own_seconds(self) -> dict[str, float]:
        """Of each phase since the last lap, without those in which it waited for other ranks."""
        return {
            name: spent.seconds - spent.waited_s for name, spent in self._this_iteration.items()
        }

    def lap(self) -> dict[str, float]:
        """`time/<phase>_s` since the last lap, `time/iteration_s` and `work/mfu`; starts the next
        one."""
        now_s = time.perf_counter()
        metrics = {f"time/{name}_s": spent.seconds for name, spent in self._this_iteration.items()}
        metrics["time/iteration_s"] = iteration_s = now_s - self._lap_s
        if self._flops_per_s and self.model_flops:
            metrics["work/mfu"] = self.model_flops / (iteration_s * self._flops_per_s)
        self._this_iteration, self._lap_s, self.model_flops = {}, now_s, 0.0
        return metrics

    def closing_rows(self) -> list[ClosingRow]:
        """Every phase of the run, the longest first, and their sum."""
        wall_s = max(self.wall_s, 1e-9)
        seconds = {name: spent.seconds for name, spent in self.total.items()}
        rows = sorted(seconds.items(), key=lambda item: -item[1])
        rows.append(("(other)", max(0.0, wall_s - sum(seconds.values()))))
        rows.append(("wall", wall_s))
        return [ClosingRow(name, taken_s, taken_s / wall_s) for name, taken_s in rows]
