"""Writes once a second where this rank's main thread is, and its stacks on request."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import dropwhile
from pathlib import Path
from typing import TextIO

from rl.ranks import loading_progress

STACKS_SIGNAL = signal.SIGRTMAX
"""Signal that requests the stacks. Not SIGUSR1, which users and batch systems send to stop a run.
faulthandler answers in C, even while the main thread never returns to Python."""
EVERY_S = 1.0
LOOK_EVERY_S = 0.1
"""10 Hz: cheap, and still notices that a thread leaves a call in which it spends 95 % of time."""
FEW_PLACES = 4
"""A main thread that visits only this many places for a long time hangs or loops."""
LONG_GAP_S = 10.0
"""A longer gap between two samples means that this process was stopped; its idle time is reset."""
LOADING = "loading"
BETWEEN = "between phases"
_BYTES = 1024
"""Size of the file, which is overwritten in place: a full disk or a kill cannot damage it."""
_MAX_CHARS = 200
_REPORTERS = (__name__, "contextlib", "rl.console.console")
_PEERS = "torch.distributed.distributed_c10d"
"""A rank inside one of its functions waits for others (gloo, and the barriers of NCCL)."""


@dataclass(frozen=True)
class Beat:
    """A rank's state at one time. Times are seconds of the machine's monotonic clock."""

    at_s: float
    phase: str
    """'learn / judge_wait': the phase of `PhaseTimer`, after the phases that enclose it."""
    phase_since_s: float
    moved_s: float
    """When the main thread last reached a place that is not among its last few."""
    where: str
    """The main thread's place in the code, e.g. 'rl.engines.vllm.vllm, in torch'."""
    waits_for_ranks: bool
    has_saved: bool
    """The rank was asked to stop, and all its finished work is on disk."""


class _Heart:
    def __init__(self) -> None:
        self.phases = [(LOADING, time.monotonic())]
        """(phase, when it began) of the enclosing phases, the innermost last."""
        self.moved_s = time.monotonic()
        self.has_saved = False
        self.descriptor: int | None = None
        self.writing = threading.RLock()
        """Keeps the heartbeat thread from overwriting a newer phase, written by the main thread,
        with an older one. Reentrant, for signal handlers."""

    def beat(self) -> None:
        """Write the heartbeat; callable from any thread."""
        if self.descriptor is not None:
            with self.writing:
                self._write(self.descriptor)

    def end(self) -> None:
        """Call in a forked child: the file is its parent's, and the lock may stay held."""
        self.descriptor = None

    def _write(self, descriptor: int) -> None:
        phases = self.phases[1:] or self.phases
        calls = loading_progress.calls()
        outside = dropwhile(lambda call: call.module in _REPORTERS, calls)
        beat = Beat(
            at_s=time.monotonic(),
            phase=" / ".join(name for name, _ in phases)[:_MAX_CHARS],
            phase_since_s=phases[-1][1],
            moved_s=self.moved_s,
            where=loading_progress.described(list(outside))[:_MAX_CHARS],
            waits_for_ranks=any(call.module == _PEERS for call in calls),
            has_saved=self.has_saved,
        )
        try:
            os.pwrite(descriptor, json.dumps(asdict(beat)).encode().ljust(_BYTES), 0)
        except OSError:
            with suppress(OSError):  # no heartbeat is better than a stale one
                os.ftruncate(descriptor, 0)


_heart = _Heart()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Record that the main thread is in phase `name` until the block ends."""
    phases = _heart.phases
    phases.append((name, time.monotonic()))
    _heart.beat()  # now, because the block may never return
    try:
        yield
    finally:
        phases.pop()
        if len(phases) == 1:
            phases[0] = (BETWEEN, time.monotonic())
        _heart.beat()


def phase_names() -> str:
    """'learn / judge_wait': the main thread's phase after enclosing ones; '' outside of phases."""
    return " / ".join(name for name, _ in _heart.phases[1:])


def note_wait() -> None:
    """Record that this process waits for something expected: a long wait is then no hang."""
    _heart.moved_s = time.monotonic()


def note_saved() -> None:
    """Record that all finished work of this rank, which was asked to stop, is on disk."""
    _heart.has_saved = True
    _heart.beat()


def file_name(rank: int) -> str:
    """Name of a rank's beat file, in the folder that the launcher and its ranks share."""
    return f"beat_{rank}.json"


def start(file: Path, log: TextIO) -> None:
    """Write heartbeats to `file` until this process ends; stacks, also of a crash, go to `log`,
    which must stay open. Call it once, early."""
    faulthandler.enable(log)
    faulthandler.register(STACKS_SIGNAL, log)
    _heart.descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
    _heart.beat()
    os.register_at_fork(after_in_child=_heart.end)
    threading.Thread(target=_watch_main_thread, name="heartbeat", daemon=True).start()


def read(file: Path) -> Beat | None:
    """The last heartbeat; None before the first one, and while one is being written."""
    with suppress(OSError, ValueError, TypeError):
        return Beat(**json.loads(file.read_bytes()))
    return None


def _watch_main_thread() -> None:
    last_stacks: OrderedDict[int, None] = OrderedDict()
    looked_s = written_s = 0.0
    while True:
        now_s, stack = time.monotonic(), hash(tuple(loading_progress.calls()))
        if stack not in last_stacks or now_s - looked_s > LONG_GAP_S:
            _heart.moved_s = now_s
        last_stacks[stack] = None
        last_stacks.move_to_end(stack)
        if len(last_stacks) > FEW_PLACES:
            last_stacks.popitem(last=False)
        looked_s = now_s
        if now_s - written_s >= EVERY_S:
            written_s = now_s
            with suppress(Exception):  # an error of this thread must not look like the rank's
                _heart.beat()
        time.sleep(LOOK_EVERY_S)
