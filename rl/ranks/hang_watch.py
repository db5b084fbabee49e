"""Finds ranks that hang, from their heartbeats and the kernel's state of their processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl.ranks import heartbeat
from rl.ranks.heartbeat import Beat

LOG_AFTER_S = 45.0
"""A rank that has made no progress for this long is logged, once."""
WATCHED_ELSEWHERE = "judge_wait"
"""A phase in which no rank counts as hanging: the judge's client has its own time limits."""

Kind = Literal["moves", "judge", "waits", "stuck", "silent", "stopped"]


@dataclass(frozen=True)
class RankState:
    kind: Kind
    idle_s: float
    """Time without progress."""
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
        self._log_after_s = min(LOG_AFTER_S, limit_s / 2)
        self._looked_s = self._awake_s = time.monotonic()
        self._logged: set[int] = set()
        self.hung: dict[int, RankState] = {}
        """The ranks that hung at the last `look`."""

    def look(self) -> bool:
        """Log ranks that hang or go on again; returns whether one has hung beyond the limit."""
        now_s = time.monotonic()
        if now_s - self._looked_s > heartbeat.LONG_GAP_S:  # e.g. Ctrl-Z stopped launcher and ranks
            self._awake_s = now_s
        self._looked_s = now_s
        looks = {rank: self._rank_state(rank, now_s) for rank in self._beats}
        states = {rank: state for rank, state in looks.items() if state is not None}
        self.hung = self._hung_of(states)
        for rank, state in self.hung.items():
            if state.idle_s >= self._log_after_s and rank not in self._logged:
                self._logged.add(rank)
                self._say(self._sentence(rank, states, now_s))
        for rank in self._logged - self.hung.keys():
            self._logged.remove(rank)
            if rank in states and states[rank].kind == "moves":
                self._say(f"rank {rank} goes on, {states[rank].at(now_s)}")
        return any(s.idle_s >= self._limit_s and self._may_end(s) for s in self.hung.values())

    def is_stopped(self, rank: int) -> bool:
        """Whether SIGSTOP or a debugger has stopped the rank, by the kernel's current state."""
        return _process_state(self._pids[rank]) in ("T", "t")

    def has_saved(self, rank: int) -> bool:
        """Whether the rank's finished work is on disk; True if it is gone or has no heartbeat."""
        state = self._rank_state(rank, time.monotonic())
        return state is None or state.beat.has_saved

    def _rank_state(self, rank: int, now_s: float) -> RankState | None:
        """None: the rank has written no heartbeat yet, or is gone."""
        state, beat = _process_state(self._pids[rank]), heartbeat.read(self._beats[rank])
        if beat is None or state in ("", "Z", "X"):
            return None
        silent_s = now_s - max(beat.at_s, self._awake_s)
        idle_s = beat.at_s - max(beat.moved_s, self._awake_s)
        kind: Kind
        if silent_s >= self._log_after_s:
            kind, idle_s = "stopped" if state in ("T", "t") else "silent", silent_s
        elif beat.phase.endswith(WATCHED_ELSEWHERE):
            kind = "judge"
        elif idle_s < self._log_after_s:
            kind = "moves"
        else:
            kind = "waits" if beat.waits_for_ranks else "stuck"
        return RankState(kind, idle_s, beat)

    def _hung_of(self, states: Mapping[int, RankState]) -> dict[int, RankState]:
        """The ranks that hang. Of several stuck ranks, only the first to get stuck counts: on a
        GPU, the others may wait for it inside any call."""
        if dead := {rank: s for rank, s in states.items() if s.kind in ("silent", "stopped")}:
            return dead
        by_move = sorted(states.items(), key=lambda item: item[1].beat.moved_s)
        if stuck := [(rank, state) for rank, state in by_move if state.kind == "stuck"]:
            return dict(stuck[:1])
        all_wait = all(state.kind == "waits" for state in states.values())
        return dict(by_move[-1:]) if all_wait else {}

    def _may_end(self, state: RankState) -> bool:
        """Whether a hang may end the run. Waiting ranks of one of several nodes may not: a rank of
        another node, not watched here, may be waiting for the judge."""
        return state.kind != "waits" or self._is_one_node

    def _sentence(self, rank: int, states: Mapping[int, RankState], now_s: float) -> str:
        state = states[rank]
        end = f"; at {self._limit_s:g} s the run ends (hang_limit_s)" * self._may_end(state)
        if state.kind == "waits":
            awaited = "each other" if self._is_one_node else "those of other nodes"
            last = f"the last of them, rank {rank}, for {state.idle_s:.0f} s, {state.at(now_s)}"
            return f"all ranks here wait for {awaited}, {last}{end}"
        cause = {
            "stopped": f"its process is stopped (kill -CONT {self._pids[rank]} resumes it)",
            "silent": "Python does not run in it: a call holds the GIL, or a disk is dead",
        }.get(state.kind, "a deadlock, or one long call")
        others = [
            f"rank {other} (in phase {other_state.beat.phase})"
            for other, other_state in states.items()
            if other != rank and (other_state.beat.waits_for_ranks or other_state.kind == "stuck")
        ]
        waiting = f"; waiting for it: {', '.join(others)}" if others else ""
        idle = f"rank {rank} has made no progress for {state.idle_s:.0f} s, {state.at(now_s)}"
        return f"{idle}: {cause}{waiting}{end}"


def _process_state(pid: int) -> str:
    """The kernel's letter: 'T' stopped, 'Z' dead; '' if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""
