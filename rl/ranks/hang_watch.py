"""Finds the ranks that hang, from their heartbeats and what the kernel says of their processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl.ranks import heartbeat
from rl.ranks.heartbeat import Beat

SAID_AFTER_S = 45.0
"""A rank that has made no progress for this long is logged, once."""
WATCHED_ELSEWHERE = "judge_wait"
"""A phase that is not watched here: the judge's client has its own time limits."""

Kind = Literal["moves", "judge", "waits", "stuck", "silent", "stopped"]


@dataclass(frozen=True)
class Seen:
    kind: Kind
    idle_s: float
    """For how long it has made no progress."""
    beat: Beat

    def at(self, now_s: float) -> str:
        """'in phase learn for 61 s, in rl.learner.train_step, in torch'."""
        inside = now_s - self.beat.phase_since_s
        return f"in phase {self.beat.phase} for {inside:.0f} s ({self.beat.where})"


class HangWatch:
    def __init__(
        self,
        beats: Mapping[int, Path],
        pids: Mapping[int, int],
        limit_s: float,
        is_one_node: bool,
        say: Callable[[str], None],
    ) -> None:
        """`beats`, `pids`: by rank. `limit_s`: how long a rank may hang."""
        self._beats, self._pids, self._say = dict(beats), dict(pids), say
        self._limit_s, self._is_one_node = limit_s, is_one_node
        self._said_after_s = min(SAID_AFTER_S, limit_s / 2)
        self._looked_s = self._awake_s = time.monotonic()
        self._named: set[int] = set()
        self.hung: dict[int, Seen] = {}
        """The ranks that hang, as of the last look."""

    def look(self) -> bool:
        """Log what is new; returns whether a rank has hung for longer than the limit."""
        now_s = time.monotonic()
        if now_s - self._looked_s > heartbeat.LONG_GAP_S:  # e.g. Ctrl-Z stopped all of us
            self._awake_s = now_s
        self._looked_s = now_s
        seen = {rank: one for rank in self._beats if (one := self._see(rank, now_s)) is not None}
        self.hung = self._hung_of(seen)
        for rank, one in self.hung.items():
            if one.idle_s >= self._said_after_s and rank not in self._named:
                self._named.add(rank)
                self._say(self._sentence(rank, seen, now_s))
        for rank in self._named - self.hung.keys():
            self._named.remove(rank)
            if rank in seen and seen[rank].kind == "moves":
                self._say(f"rank {rank} goes on, {seen[rank].at(now_s)}")
        return any(one.idle_s >= self._limit_s and self._may_end(one) for one in self.hung.values())

    def is_stopped(self, rank: int) -> bool:
        """Whether SIGSTOP or a debugger has stopped the rank, by the kernel's current state."""
        return _process_state(self._pids[rank]) in ("T", "t")

    def has_saved(self, rank: int) -> bool:
        """Whether all the rank has finished is on disk; True if it is gone or has no beat yet."""
        one = self._see(rank, time.monotonic())
        return one is None or one.beat.has_saved

    def _see(self, rank: int, now_s: float) -> Seen | None:
        """None: the rank has written no heartbeat yet, or is gone."""
        state, beat = _process_state(self._pids[rank]), heartbeat.read(self._beats[rank])
        if beat is None or state in ("", "Z", "X"):
            return None
        silent_s = now_s - max(beat.at_s, self._awake_s)
        idle_s = beat.at_s - max(beat.moved_s, self._awake_s)
        kind: Kind
        if silent_s >= self._said_after_s:
            kind, idle_s = "stopped" if state in ("T", "t") else "silent", silent_s
        elif beat.phase.endswith(WATCHED_ELSEWHERE):
            kind = "judge"
        elif idle_s < self._said_after_s:
            kind = "moves"
        else:
            kind = "waits" if beat.waits_for_ranks else "stuck"
        return Seen(kind, idle_s, beat)

    def _hung_of(self, seen: Mapping[int, Seen]) -> dict[int, Seen]:
        """The ranks to blame. Of several stuck ranks only the first that got stuck: on a GPU, the
        others may wait for it inside any call."""
        if dead := {rank: one for rank, one in seen.items() if one.kind in ("silent", "stopped")}:
            return dead
        by_move = sorted(seen.items(), key=lambda item: item[1].beat.moved_s)
        if stuck := [(rank, one) for rank, one in by_move if one.kind == "stuck"]:
            return dict(stuck[:1])
        all_wait = all(one.kind == "waits" for one in seen.values())
        return dict(by_move[-1:]) if all_wait else {}

    def _may_end(self, one: Seen) -> bool:
        """Whether it may end the run: ranks of other nodes, unseen here, may wait for the judge."""
        return one.kind != "waits" or self._is_one_node

    def _sentence(self, rank: int, seen: Mapping[int, Seen], now_s: float) -> str:
        one = seen[rank]
        end = f"; at {self._limit_s:g} s the run ends (hang_limit_s)" if self._may_end(one) else ""
        if one.kind == "waits":
            whom = "each other" if self._is_one_node else "those of other nodes"
            named = f"the last of them, rank {rank}, for {one.idle_s:.0f} s, {one.at(now_s)}"
            return f"all ranks here wait for {whom}, {named}{end}"
        how = {
            "stopped": f"its process is stopped (kill -CONT {self._pids[rank]} lets it go on)",
            "silent": "no Python runs in it: a call that holds the interpreter, or a dead disk",
        }.get(one.kind, "a deadlock, or one long call")
        others = [
            f"rank {other} (in phase {them.beat.phase})"
            for other, them in seen.items()
            if other != rank and (them.beat.waits_for_ranks or them.kind == "stuck")
        ]
        waiting = f"; waiting for it: {', '.join(others)}" if others else ""
        idle = f"rank {rank} has not moved on for {one.idle_s:.0f} s, {one.at(now_s)}: {how}"
        return idle + waiting + end


def _process_state(pid: int) -> str:
    """The kernel's letter: 'T' stopped, 'Z' dead; '' for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""
