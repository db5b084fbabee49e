"""How a node's ranks end: which of them failed first and why, what a rank that hangs is ended with,
and that nothing of them is left.

What: functions of the launcher, over what `worker.py` and `heartbeat.py` have noted. What not:
whether the run is started again (`simple_launch.py`).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.ranks import heartbeat
from rl.ranks.hang_watch import HangWatch
from rl.ranks.signals import STOP_SIGNALS

GRACE_S = 300
"""How long ranks may take to save after a signal before they are killed."""
HUNG_GRACE_S = 120
"""The same where one hangs for good: the others save alone, what they hold in memory."""
ALONE_GRACE_S = 45
"""The same where a node is lost: a rank that waits for it saves meanwhile, and never ends."""
LEAVE_S = 5
"""For ranks that have saved alone and may yet leave by themselves."""
HUNG_CODE = 124
"""The launcher's exit code after a hang, as of `timeout`."""
PEERS_TERM_S = 30
"""After a failure the others have so long to end by SIGTERM (torch's), then they are killed."""


@dataclass(frozen=True)
class Ending:
    """Of one start of the ranks."""

    code: int
    """The exit code to pass on."""
    what: str
    """'rank 1 was killed by SIGKILL'."""
    by_machine: bool
    """It died of the machine: a signal, a device, a connection, a hang."""
    lines: tuple[str, ...] = ()
    """What to tell the user."""


@dataclass(frozen=True)
class Failure:
    """A rank's process that ended with an error."""

    exit_code: int
    """Negative: the signal that killed it."""
    at_s: float
    """When that was seen, seconds since 1970."""


def of_failure(failures: Mapping[int, Failure], notes: Path, log_dir: Path) -> Ending:
    """Name the rank that failed first, and why. `failures`: by rank."""
    first_s = min(failure.at_s for failure in failures.values())

    def order(rank: int) -> tuple[bool, bool, int]:
        # A rank that could not even note its end died hardest; one that SIGTERM ended was asked to,
        # and so was one that took no notice of it and was killed for that.
        note, code = _note(notes, rank), failures[rank].exit_code
        late = failures[rank].at_s - first_s > PEERS_TERM_S - 5
        asked = code == -signal.SIGTERM or (code == -signal.SIGKILL and late)
        return asked, note.get("only_heard", False), note.get("ended_ns", 0)

    rank = min(failures, key=order)
    code, note = failures[rank].exit_code, _note(notes, rank)
    name = signal.Signals(-code).name if code < 0 else ""
    how = f"killed by {name}" if name else f"exit code {code}"
    lines = [f"rank {rank} failed: {how}; logs: {log_dir}"]
    reason = note.get("reason", "")
    if rank != 0 and reason != _note(notes, 0).get("reason"):  # rank 0 has said its own
        lines.append(reason)
    return Ending(
        code if code >= 0 else 128 - code,
        f"rank {rank} was killed by {name}" if name else f"rank {rank} failed with an error",
        -code not in STOP_SIGNALS if name else bool(note.get("by_machine")),
        tuple(lines),
    )


def end_hung(watch: HangWatch, pids: Mapping[int, int], say: Callable[[str], None]) -> Ending:
    """All ranks write their stacks, save, and leave or are left to be killed.

    A rank that is stopped is woken for it: then all leave together, and nothing is lost.
    """
    hung = ", ".join(f"rank {rank}" for rank in watch.hung)
    can_wake = all(one.kind == "stopped" for one in watch.hung.values())
    say(
        f"{hung} hung for too long (hang_limit_s): the stacks of all ranks go to their logs, what "
        "is finished is saved, and the run ends"
    )
    for signum in (heartbeat.ASKS_STACKS, signal.SIGTERM, signal.SIGCONT):
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
    asked_s = time.monotonic()
    while watch.alive() and (waited_s := time.monotonic() - asked_s) < GRACE_S:
        time.sleep(0.2)
        if can_wake and all(watch.is_answering(rank) for rank in watch.hung):
            continue
        living = [rank for rank in watch.alive() if watch.is_answering(rank)]
        have_saved = all(watch.has_saved(rank) for rank in living)
        if waited_s > (LEAVE_S if have_saved else HUNG_GRACE_S):
            break
    return Ending(HUNG_CODE, f"{hung} hung", by_machine=True)


def of_lost_node(lost: str, say: Callable[[str], None]) -> Ending:
    """`lost`: which is out of reach. The ranks here are to be ended next."""
    say(
        f"{lost} (machine, launcher or network): the ranks here save and end; the same command on "
        "every node resumes the run"
    )
    return Ending(1, lost, by_machine=True)


def end_leftovers(notes: Path) -> None:
    """Kill what a rank that died left in its process group (an engine's own workers, say)."""
    for file in notes.glob("rank_*.json"):
        group = _row(file).get("process_group")
        if isinstance(group, int):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def _note(notes: Path, rank: int) -> dict[str, Any]:
    return _row(notes / f"rank_{rank}.json")


def _row(file: Path) -> dict[str, Any]:
    """What `worker.py` wrote about a rank; {} when it did not get that far."""
    with suppress(OSError, ValueError):
        return dict(json.loads(file.read_bytes()))
    return {}
