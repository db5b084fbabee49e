"""What a run prints: phases, iterations, progress, some completions of one group."""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rl.api.types import Episode, Status
from rl.meter import has_passed, seconds_between, time_mark
from rl.printing import excerpt, guard, plain, wrapped
from rl.ranks import heartbeat
from rl.ranks.dist import waited_s

# ---- console -------------------------------------------------------------------------------------
# What a run prints: a line per phase, a summary line per iteration, a table of phase times.

SUMMARY = {
    "reward/mean": "reward",
    "eval/reward": "held-out",
    "eval/gain_over_stock": "over stock",
    "drift/state_l2": "states moved",
    "kl/reference_k3": "kl",
    "optimizer/grad_norm": "grad",
    "memory/peak_gb": "peak GB",
    "renderer/pool_workers": "workers",
    "renderer/pool_queue": "queue",
    "renderer/pool_remote_share": "remote",
}
UNLESS_0 = {
    "status/ungraded": ("ungraded", ".1%"),
    "eval/ungraded": ("held-out ungraded", ".1%"),
    "renderer/pool_restarts": ("restarts", ".0f"),
}
"""Metrics that the summary line shows only if they are not 0, with label and format."""
_ETA_WINDOW = 20
"""Number of latest iterations that the time per iteration is averaged over."""
_BLOCK_WIDTH = 80
"""Columns of a block of text."""


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
    """Prints for one process, with colours and a live line only if the stream is a terminal."""

    def __init__(self, enabled: bool, stream: TextIO | None = None) -> None:
        """`enabled`: whether anything is printed (rank 0). `stream`: default stdout."""
        self._rich = RichConsole(
            file=stream or wrapped(sys.stdout),
            quiet=not enabled,
            highlight=False,
            emoji=False,  # ':smile:' in a completion is text
            soft_wrap=True,
        )
        self.enabled = enabled
        self.live_text = ""
        """The text of the live line; '' if there is none."""
        self._has_terminal = enabled and self._rich.is_terminal
        self._live: Live | None = None
        self._iteration_s: deque[float] = deque(maxlen=_ETA_WINDOW)

    def say(self, text: str) -> None:
        self._rich.print(plain(text), markup=False)

    def live(self, text: str) -> bool:
        """Show `text` on a line that is redrawn in place ('' removes the line). Returns False if
        the stream is not a terminal."""
        if not self._has_terminal:
            return False
        self.live_text = text
        if not text and self._live is not None:
            self._live.stop()
            self._live = None
        elif text:
            line = Spinner("dots", Text(plain(text)))
            if self._live is None:
                # If stdout is a pipe, a program reads from it: do not redirect it.
                redirect = wrapped(sys.stdout).isatty()
                self._live = Live(
                    line, console=self._rich, transient=True, redirect_stdout=redirect
                )
                self._live.start(refresh=True)
                guard()  # rich has replaced the guarded streams
            else:
                self._live.update(line, refresh=True)
        return True

    def iteration(self, iteration: int, num_iterations: int, metrics: Mapping[str, float]) -> None:
        """The line of a finished iteration; `iteration` counts from 1."""
        parts = [f"[{iteration}/{num_iterations}]"]
        parts += [f"{SUMMARY[name]} {metrics[name]:.4g}" for name in SUMMARY if name in metrics]
        if "eval/reward_low" in metrics:
            low, high = metrics["eval/reward_low"], metrics["eval/reward_high"]
            parts.append(f"held-out, unreadable as 0 or 1: {low:.4g} to {high:.4g}")
        for name, (label, form) in UNLESS_0.items():
            parts += [f"{label} {value:{form}}"] if (value := metrics.get(name)) else []
        parts += ["DRIFT"] * bool(metrics.get("drift/alarm"))
        parts += ["NO STEP"] * (metrics.get("optimizer/steps") == 0)
        if "time/iteration_s" in metrics and iteration:  # 0: the first evaluation's time
            self._iteration_s.append(metrics["time/iteration_s"])
            mean_s = sum(self._iteration_s) / len(self._iteration_s)
            parts.append(f"{duration(mean_s)}/it")
            parts.append(f"ETA {duration(mean_s * (num_iterations - iteration))}")
        self._rich.print("  ".join(parts), markup=False, style="bold")

    def framed(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """(label, text) rows between rules of 80 columns; labels beginning with a space are dim."""
        table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        for label, text in rows:
            table.add_row(Text(label, "dim" if label[:1] == " " else "bold"), Text(plain(text)))
        self.say(f"---- {title} ".ljust(_BLOCK_WIDTH, "-"))
        self._rich.print(table, width=_BLOCK_WIDTH, soft_wrap=False)
        self.say("-" * _BLOCK_WIDTH)

    def print_phase_times(self, timer: PhaseTimer) -> None:
        """A table of the run's phases, the longest first, and their sum."""
        table = Table("phase", "time", "share of wall", title="where did the time go (rank 0)")
        wall_s = max(timer.wall_s, 1e-9)
        rows = sorted(timer.total.items(), key=lambda row: -row[1])
        rows += [("(other)", max(0.0, wall_s - sum(timer.total.values()))), ("wall", wall_s)]
        for name, phase_s in rows:
            table.add_row(name, duration(phase_s), f"{phase_s / wall_s:.1%}")
        self._rich.print(table)


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


# ---- group panel ---------------------------------------------------------------------------------
# Prints one group every n-th iteration: best, median and worst completion, one without reward.

MAX_TEXT_CHARS, MAX_REPLY_CHARS, MAX_NAME_CHARS = 240, 160, 40
MAX_REPLIES = 2
"""Limit of replies shown per reward and completion."""
Row = tuple[str, str]
"""(label, text)."""


class GroupPanel:
    """Keeps the rows of a group until the line of its iteration is printed."""

    def __init__(self, console: Console, every_n_iterations: int) -> None:
        self._console = console
        self._every = every_n_iterations
        self._noted: tuple[str, list[Row]] | None = None

    def note(
        self,
        iteration: int,
        episodes_PG: Sequence[Sequence[Episode]],
        advantages_PG: Sequence[Sequence[float | None]],
    ) -> None:
        due = self._every > 0 and iteration % self._every == 0 and self._console.enabled
        if due and episodes_PG and episodes_PG[0]:
            rows = group_rows(episodes_PG[0], advantages_PG[0])
            self._noted = f"one group of iteration {iteration}", rows

    def show(self) -> None:
        """Print the noted group, once."""
        if self._noted is not None:
            self._console.framed(*self._noted)
            self._noted = None


def group_rows(episodes_G: Sequence[Episode], advantages_G: Sequence[float | None]) -> list[Row]:
    first = episodes_G[0]
    sample = excerpt(first.prompt.sample.id, MAX_TEXT_CHARS)
    rewards = [e.reward for e in episodes_G if e.reward is not None]
    summary = [f"{len(episodes_G)} completions"]
    if rewards:
        summary.append(f"reward {fmean(rewards):.3g} ({min(rewards):.3g} to {max(rewards):.3g})")
    for status in (Status.POLICY_FAILED, Status.UNGRADED):
        if num := sum(episode.status is status for episode in episodes_G):
            summary.append(f"{num} {status.value}")
    rows = [
        ("asked", excerpt(first.prompt.sample.instruction, MAX_TEXT_CHARS)),
        ("sample", f"{sample} (group {excerpt(first.group_id, MAX_NAME_CHARS)})"),
        ("group", ", ".join(summary)),
    ]
    for label, g in chosen(episodes_G):
        rows += _rows_of(label, episodes_G[g], advantages_G[g])
    return rows


def chosen(episodes_G: Sequence[Episode]) -> list[tuple[str, int]]:
    """(label, index in the group) of the completions to show; if all rewards are equal, none is
    labelled 'best' or 'worst'."""
    rewards = {g: e.reward for g, e in enumerate(episodes_G) if e.reward is not None}
    order = sorted(rewards, key=lambda g: (-rewards[g], g))
    lost = [g for g in range(len(episodes_G)) if g not in rewards][:1]
    indices = [order[at] for at in sorted({0, len(order) // 2, len(order) - 1})] if order else []
    names = ["best", "between", "worst"] if len(indices) == 3 else ["best", "worst"]
    if len(set(rewards.values())) <= 1:
        names = ["one", "another", "a third"]
    return [*zip(names, indices, strict=False), *(("lost", g) for g in lost)]


def _rows_of(label: str, episode: Episode, advantage: float | None) -> list[Row]:
    facts = [] if episode.reward is None else [f"reward {episode.reward:.3g}"]
    facts += [] if advantage is None else [f"advantage {advantage:+.3g}"]
    facts += [] if episode.status is Status.SCORED else [episode.status.value]
    facts += [excerpt(episode.failure, MAX_TEXT_CHARS)] if episode.failure else []
    facts += ["cut at the token limit"] if episode.completion.finish == "length" else []
    rows = [(label, ", ".join(facts))]
    if episode.action.thought:
        rows.append(("  thought", excerpt(episode.action.thought, MAX_TEXT_CHARS)))
    rows.append(("  wrote", excerpt(episode.action.words, MAX_TEXT_CHARS) or "(nothing)"))
    if episode.parts:
        parts = [f"{_name(name)}={value:.3g}" for name, value in episode.parts.items()]
        rows.append(("  parts", "  ".join(parts)))
    for name, replies in episode.replies.items():
        asker = f"({_name(name)}) " if len(episode.replies) > 1 else ""
        rows += [("  judge", asker + excerpt(r, MAX_REPLY_CHARS)) for r in replies[:MAX_REPLIES]]
        if (more := len(replies) - MAX_REPLIES) > 0:
            rows.append(("", f"{asker}and {more} more"))
    return rows


def _name(name: str) -> str:
    """'viescore/sc' -> 'sc': drops the reward's name before the slash."""
    return excerpt(name.rpartition("/")[2], MAX_NAME_CHARS)
