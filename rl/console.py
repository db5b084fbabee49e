"""What a run prints: phases, iterations, progress, some completions of one group."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rl.api.types import Episode, Status
from rl.printing import excerpt, guard, plain, wrapped

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

    def print_phase_times(self, seconds: Mapping[str, float], wall_s: float) -> None:
        """A table of the run's phases, the longest first, and their sum."""
        table = Table("phase", "time", "share of wall", title="where did the time go (rank 0)")
        rows = sorted(seconds.items(), key=lambda row: -row[1])
        rows += [("(other)", max(0.0, wall_s - sum(seconds.values()))), ("wall", wall_s)]
        for name, phase_s in rows:
            table.add_row(name, duration(phase_s), f"{phase_s / max(wall_s, 1e-9):.1%}")
        self._rich.print(table)


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
