"""Ends a node's ranks: on request, because one failed, or because one hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.ranks import heartbeat
from rl.ranks.hang_watch import HangWatch
from rl.ranks.signals import STOP_SIGNALS, name_of

GRACE_S = 300
"""How long ranks may take to save and exit before they are killed."""
HUNG_GRACE_S = 120
"""The same if one hangs or stays stopped: the others save without it."""
ALONE_GRACE_S = 45
"""The same if a node is lost: a rank that waits for that node can save but never exits."""
LEAVE_S = 5
"""The same if one hangs and all others have saved."""
KILL_S = 30
HUNG_CODE = 124
"""The launcher's exit code after a hang; `timeout` uses the same."""
FINISHED_CODE = 86
"""A rank's exit code when its script has ended. A 0 is not its own: a library or a plugin called
`exit` or `os._exit` in the middle of the run."""
PEERS_TERM_S = 30
"""How long after a failure the other ranks may take to end by SIGTERM before SIGKILL."""


@dataclass(frozen=True)
class Ending:
    """How one start of the ranks ended."""

    code: int
    what: str
    """'rank 1 was killed by SIGKILL'; '' if nothing failed."""
    by_machine: bool
    """The machine ended it: a signal, a device, a connection, a hang."""
    lines: tuple[str, ...] = ()
    stop_requested: bool = False
    """The launcher was asked to stop: no restart."""


@dataclass(frozen=True)
class Failure:
    exit_code: int
    """Negative: the signal that killed it."""
    at_s: float
    """When the launcher saw that it had ended, `time.monotonic`."""


def of_failure(failures: Mapping[int, Failure], notes: Path, log_dir: Path) -> Ending:
    """Names the rank that failed first, and the cause. `failures`: by rank."""
    first_s = min(failure.at_s for failure in failures.values())

    def order(rank: int) -> tuple[bool, bool, int]:
        # Ranks without a note of their end sort first. Ranks ended by SIGTERM were asked to end;
        # so were ranks that ignored it and were then killed.
        note, code = _note(notes, rank), failures[rank].exit_code
        late = failures[rank].at_s - first_s > PEERS_TERM_S - 5
        asked = code == -signal.SIGTERM or (code == -signal.SIGKILL and late)
        return asked, note.get("only_heard", False), note.get("ended_ns", 0)

    rank = min(failures, key=order)
    code, note = failures[rank].exit_code, _note(notes, rank)
    name = name_of(-code) if code < 0 else ""
    cause = f"killed by {name}" if name else f"exit code {code}"
    if code == 0:
        cause = "a library or a plugin ended the process (os._exit) before the run had finished"
    lines = [f"rank {rank} failed: {cause}; logs: {log_dir}"]
    reason = note.get("reason", "")
    if rank != 0 and reason != _note(notes, 0).get("reason"):  # rank 0 has printed its reason
        lines.append(reason)
    return Ending(
        (code or 1) if code >= 0 else 128 - code,
        f"rank {rank} was killed by {name}" if name else f"rank {rank} failed with an error",
        -code not in STOP_SIGNALS if name else bool(note.get("by_machine")),
        tuple(lines),
    )


class Ranks:
    """The processes of this node's ranks, each the leader of a process group."""

    def __init__(
        self,
        processes: Mapping[int, subprocess.Popen[bytes]],
        watch: HangWatch,
        say: Callable[[str], None],
    ) -> None:
        """`processes`: by rank. `say` prints a line."""
        self._processes, self._watch, self._say = processes, watch, say

    def all_done(self) -> bool:
        return all(process.poll() == FINISHED_CODE for process in self._processes.values())

    def failures(self) -> dict[int, Failure]:
        """The ranks that have ended before their script so far, as seen now."""
        now_s = time.monotonic()
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        finished = (None, FINISHED_CODE)
        return {rank: Failure(code, now_s) for rank, code in codes.items() if code not in finished}

    def end_hung(self) -> Ending:
        """Make all ranks write their stacks and save; kill those that do not exit."""
        hung = ", ".join(f"rank {rank}" for rank in self._watch.hung)
        self._say(
            f"{hung} hung for too long (hang_limit_s): the stacks of all ranks go to their logs, "
            "finished work is saved, and the run ends"
        )
        for process in self._processes.values():
            process.send_signal(heartbeat.STACKS_SIGNAL)
        can_wake = all(map(self._watch.is_stopped, self._watch.hung))
        self.leave([signal.SIGTERM], GRACE_S if can_wake else HUNG_GRACE_S)
        return Ending(HUNG_CODE, f"{hung} hung", by_machine=True)

    def end_alone(self, lost: str) -> Ending:
        """Make the ranks here save; kill those that do not exit. `lost`: the unreachable node."""
        self._say(
            f"{lost} (machine, launcher or network): the ranks here save and end; the same command "
            "on every node resumes the run"
        )
        self.leave([signal.SIGTERM], ALONE_GRACE_S)
        return Ending(1, lost, by_machine=True)

    def leave_as_asked(self, signums: list[int]) -> Ending:
        """Pass on the signals that asked the launcher to stop; `signums` may grow meanwhile."""
        self.leave(signums)
        reason = f"stopped by {name_of(signums[0])}; the same command resumes the run from its "
        return Ending(128 + signums[0], "", by_machine=False, lines=(reason + "last checkpoint",))

    def leave(self, signums: list[int], grace_s: float = GRACE_S) -> None:
        """Send the ranks `signums`, which may grow, and wake stopped ranks. Wait until all
        have saved and exited; kill the rest after `grace_s`, or sooner if one hangs."""
        began_s, num_sent, watch = time.monotonic(), 0, self._watch
        while living := {r: each for r, each in self._processes.items() if each.poll() is None}:
            if num_sent < len(signums):
                _send(living, *signums[num_sent:], signal.SIGCONT)
                num_sent = len(signums)
            watch.look()
            stopped = {rank for rank in living if watch.is_stopped(rank)}
            limit_s = min(grace_s, HUNG_GRACE_S) if stopped else grace_s
            if (stopped or watch.hung) and all(map(watch.has_saved, living.keys() - stopped)):
                limit_s = LEAVE_S
            if time.monotonic() - began_s > limit_s:
                names = ", ".join(f"rank {r}{' (stopped)' if r in stopped else ''}" for r in living)
                self._say(
                    f"killed, as they did not exit within {limit_s:g} s of being asked: {names}"
                )
                _send(living, signal.SIGKILL)
                for process in living.values():
                    with suppress(subprocess.TimeoutExpired):  # e.g. one waits for a dead disk
                        process.wait(KILL_S)
                return
            time.sleep(0.2)


def _send(living: Mapping[int, subprocess.Popen[bytes]], *signums: int) -> None:
    for process in living.values():
        for signum in signums:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signum)


def end_leftovers(notes: Path) -> None:
    """Kill processes that a dead rank left in its process group (e.g. an engine's workers)."""
    for file in notes.glob("rank_*.json"):
        group = _row(file).get("process_group")
        if isinstance(group, int):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def _note(notes: Path, rank: int) -> dict[str, Any]:
    return _row(notes / f"rank_{rank}.json")


def _row(file: Path) -> dict[str, Any]:
    """The note that `worker.py` wrote about a rank; {} if it wrote none."""
    with suppress(OSError, ValueError):
        return dict(json.loads(file.read_bytes()))
    return {}
