"""Prints one group every n-th iteration: its best, worst, a middle and a lost completion."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rl.api.types import Episode, Status
from rl.record.console import Console
from rl.record.untrusted import shown

MAX_WORDS_CHARS = 240
"""Of an instruction, a completion, a cause."""
MAX_REPLY_CHARS = 160
MAX_REPLIES = 2
"""Of one reward to one completion."""
MAX_PARTS = 16
MAX_NAME_CHARS = 40
Row = tuple[str, str]
"""(label, text)."""


class GroupPanel:
    """What is to be shown of this process's groups, from when it is known until the iteration's own
    line is out. A panel that is not due costs nothing."""

    def __init__(self, console: Console, every_n_iterations: int) -> None:
        """`every_n_iterations`: 0 = never."""
        self._console = console
        self._every = every_n_iterations
        self._noted: tuple[str, list[Row]] | None = None

    def note(
        self,
        iteration: int,
        episodes_PG: Sequence[Sequence[Episode]],
        advantages_PG: Sequence[Sequence[float | None]],
    ) -> None:
        """Of iteration `iteration`, which counts from 1."""
        due = self._every > 0 and iteration % self._every == 0 and self._console.enabled
        if due and episodes_PG and episodes_PG[0]:
            rows = group_rows(episodes_PG[0], advantages_PG[0])
            self._noted = f"one group of iteration {iteration}", rows

    def show(self) -> None:
        """Print what was noted, once."""
        if self._noted is not None:
            self._console.framed(*self._noted)
            self._noted = None


def group_rows(episodes_G: Sequence[Episode], advantages_G: Sequence[float | None]) -> list[Row]:
    """The lines of a panel."""
    first = episodes_G[0]
    sample = shown(first.prompt.sample.id, MAX_WORDS_CHARS)
    rows = [
        ("asked", shown(first.prompt.sample.instruction, MAX_WORDS_CHARS)),
        ("sample", f"{sample} (group {shown(first.group_id, MAX_NAME_CHARS)})"),
        ("group", _summary(episodes_G)),
    ]
    for label, g in chosen(episodes_G):
        rows += _rows_of(label, episodes_G[g], advantages_G[g])
    return rows


def chosen(episodes_G: Sequence[Episode]) -> list[tuple[str, int]]:
    """(what it is, its number in the group) of the completions to show: never only the best. Equal
    rewards make none of them the best."""
    rewards = {g: e.reward for g, e in enumerate(episodes_G) if e.reward is not None}
    order = sorted(rewards, key=lambda g: (-(rewards[g] or 0.0), g))
    lost = [g for g in range(len(episodes_G)) if g not in rewards][:1]
    picked = [*order[:1], *order[-1:]] if len(order) > 1 else order
    said = {episodes_G[g].action.words for g in picked}
    between = [g for g in order if g not in picked]
    # One that says something else, where there is one.
    other = [g for g in between if episodes_G[g].action.words not in said] or between
    picked[1:1] = other[len(other) // 2 : len(other) // 2 + 1]
    names = ["best", "between", "worst"] if len(picked) == 3 else ["best", "worst"]
    if len(set(rewards.values())) <= 1:
        names = ["one", "another", "a third"]
    return [*zip(names, picked, strict=False), *(("lost", g) for g in lost)]


def _summary(episodes_G: Sequence[Episode]) -> str:
    rewards = [e.reward for e in episodes_G if e.reward is not None]
    parts = [f"{len(episodes_G)} completions"]
    if rewards:
        parts.append(f"reward {fmean(rewards):.3g} ({min(rewards):.3g} to {max(rewards):.3g})")
    for status in (Status.POLICY_FAILED, Status.UNGRADED):
        if num := sum(episode.status is status for episode in episodes_G):
            parts.append(f"{num} {status.value}")
    return ", ".join(parts)


def _rows_of(label: str, episode: Episode, advantage: float | None) -> list[Row]:
    worth = [] if episode.reward is None else [f"reward {episode.reward:.3g}"]
    worth += [] if advantage is None else [f"advantage {advantage:+.3g}"]
    if episode.status is not Status.SCORED:
        worth.append(episode.status.value)
    if episode.failure:
        worth.append(shown(episode.failure, MAX_WORDS_CHARS))
    if episode.completion.finish == "length":
        worth.append("cut at the token limit")
    rows = [(label, ", ".join(worth))]
    if episode.action.thought:
        rows.append(("  thought", shown(episode.action.thought, MAX_WORDS_CHARS)))
    rows.append(("  wrote", shown(episode.action.words, MAX_WORDS_CHARS) or "(nothing)"))
    if episode.parts:
        rows.append(("  parts", _parts(episode)))
    for name, replies in episode.replies.items():
        asker = f"({_name(name)}) " if len(episode.replies) > 1 else ""
        for reply in replies[:MAX_REPLIES]:
            rows.append(("  judge", asker + shown(reply, MAX_REPLY_CHARS)))
        if (more := len(replies) - MAX_REPLIES) > 0:
            rows.append(("", f"{asker}and {more} more"))
    return rows


def _parts(episode: Episode) -> str:
    parts = [f"{_name(name)}={value:.3g}" for name, value in episode.parts.items()]
    more = len(parts) - MAX_PARTS
    return "  ".join(parts[:MAX_PARTS]) + (f" and {more} more" if more > 0 else "")


def _name(name: str) -> str:
    """'viescore/sc' -> 'sc': its reward stands before it."""
    return shown(name.rpartition("/")[2], MAX_NAME_CHARS)
