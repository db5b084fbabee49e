"""Prints one group every n-th iteration: best, median and worst completion, one without reward."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rl.api.types import Episode, Status
from rl.console.console import Console
from rl.text.untrusted import excerpt

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
