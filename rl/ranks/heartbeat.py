"""Where a rank is: heartbeats for the launcher."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TextIO

from cachetools import LRUCache

# ---- place ---------------------------------------------------------------------------------------
# Finds where the main thread is.

_read_lock = threading.Lock()


class Call(NamedTuple):
    module: str
    """'rl.run.run', also for the module that Python runs as `__main__`."""
    code: int
    instruction: int
    """Byte offset of the current instruction."""


def described(calls: Sequence[Call]) -> str:
    """'rl.engines.vllm, in torch': the innermost `rl` module among `calls` (innermost first),
    and the package that it called."""
    package = ""
    for call in calls:
        top = call.module.split(".")[0]
        if top == "rl":
            return f"{call.module}, in {package}" if package else call.module
        if top not in sys.stdlib_module_names and top not in ("__main__", "None"):
            package = top
    return f"Python, in {package}" if package else "Python"


def calls() -> list[Call]:
    """The main thread's call stack, innermost first; callable from any thread. Another thread reads
    it with garbage collection off: the read creates frame objects (Python 3.11), and a collection
    could run finalizers that let the main thread run on, which would crash the process."""
    if threading.current_thread() is threading.main_thread():
        return _calls_from(sys._getframe(1))
    with _read_lock:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return _calls_from(sys._current_frames().get(threading.main_thread().ident or 0))
        finally:
            if was_enabled:
                gc.enable()


def _calls_from(frame: FrameType | None) -> list[Call]:
    stack = []
    while frame is not None:
        spec = frame.f_globals.get("__spec__")
        module = str(spec.name if spec else frame.f_globals.get("__name__"))
        stack.append(Call(module, id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return stack


# ---- heartbeat -----------------------------------------------------------------------------------
# Writes once a second where this rank's main thread is, and its stacks on request.

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
"""The phase before the first one."""
BETWEEN = "between phases"
_BYTES = 4096
"""Size of the file, which is overwritten in place: a full disk or a kill cannot damage it."""
_MAX_CHARS = 200
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
    """The main thread's place in the code, e.g. 'rl.engines.vllm, in torch'."""
    waits_for_ranks: bool


class _Heart:
    def __init__(self) -> None:
        self.phases = [(LOADING, time.monotonic())]
        """(phase, when it began) of the enclosing phases, the innermost last."""
        self.moved_s = time.monotonic()
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
        stack = calls()
        beat = Beat(
            at_s=time.monotonic(),
            phase=" / ".join(name for name, _ in phases)[:_MAX_CHARS],
            phase_since_s=phases[-1][1],
            moved_s=self.moved_s,
            where=described(stack)[:_MAX_CHARS],
            waits_for_ranks=any(call.module == _PEERS for call in stack),
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


def note_wait() -> None:
    """Record that this process waits for something expected: a long wait is then no hang."""
    _heart.moved_s = time.monotonic()


def file_name(rank: int) -> str:
    """Name of a rank's beat file, in the folder that the launcher and its ranks share."""
    return f"beat_{rank}.json"


def start(file: Path, log: TextIO) -> None:
    """Write heartbeats to `file` until this process ends; stacks, also of a crash, go to `log`,
    which must stay open. Warn if there is no room for `file`. Call it once, early."""
    faulthandler.enable(log)
    faulthandler.register(STACKS_SIGNAL, log)
    _heart.descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
    _heart.beat()
    if not os.fstat(_heart.descriptor).st_size:
        print(f"WARNING: {file} has no room (TMPDIR): a hang is not noticed", file=sys.stderr)
    os.register_at_fork(after_in_child=_heart.end)
    threading.Thread(target=_watch_main_thread, name="heartbeat", daemon=True).start()


def read(file: Path) -> Beat | None:
    """The last heartbeat; None before the first one, and while one is being written."""
    with suppress(OSError, ValueError, TypeError):
        return Beat(**json.loads(file.read_bytes()))
    return None


def _watch_main_thread() -> None:
    last_stacks: LRUCache[int, None] = LRUCache(FEW_PLACES)
    looked_s = written_s = 0.0
    while True:
        now_s, stack = time.monotonic(), hash(tuple(calls()))
        if stack not in last_stacks or now_s - looked_s > LONG_GAP_S:
            _heart.moved_s = now_s
        last_stacks[stack] = None
        looked_s = now_s
        if now_s - written_s >= EVERY_S:
            written_s = now_s
            with suppress(Exception):  # an error of this thread must not look like the rank's
                _heart.beat()
        time.sleep(LOOK_EVERY_S)
