"""Requests to stop: a signal sets a flag; the loop checks it between phases, saves and exits."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from rl.ranks import heartbeat
from rl.ranks.dist import Dist

_UNHANDLED = "KILL STOP CONT TSTP TTIN TTOU CHLD URG WINCH PIPE XFSZ ILL TRAP ABRT BUS FPE SEGV SYS"
"""Signals that cannot be caught, that end no process by default (Python ignores PIPE and XFSZ), or
that report a crash of native code."""
_OTHERS = {heartbeat.STACKS_SIGNAL, *(getattr(signal, f"SIG{name}") for name in _UNHANDLED.split())}
STOP_SIGNALS = tuple(sorted(signal.valid_signals() - _OTHERS))
"""Signals that by default end the process and lose unsaved work: TERM, INT, HUP, QUIT
(Ctrl-\\), a batch system's notice (USR1, USR2, XCPU), timers, real-time signals."""
END_IF_REPEATED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a process at once when sent twice. (The kernel repeats XCPU by itself.)"""
ECHO_S = 3.0
"""Ctrl-C reaches a rank twice within milliseconds, from the terminal and from the launcher; only a
later repetition is a request to end at once."""
_PR_SET_PDEATHSIG = 1

_received_s: dict[int, float] = {}
"""Stop signal that this process received -> time of the first one, `time.monotonic`."""


def name_of(signum: int) -> str:
    """'SIGTERM'; 'signal 35' for a real-time signal, most of which have no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def install() -> None:
    """Call this once, in the main thread. The first signal sets the flag; one of `END_IF_REPEATED`,
    sent again after `ECHO_S`, ends the process. If the launcher dies, Linux sends SIGTERM."""
    for signum in _ours():
        signal.signal(signum, _handle)
    die_with_parent()


@contextmanager
def collect_stop_signals() -> Iterator[list[int]]:
    """Within the block, stop signals only append to the yielded list. Use in the main thread."""
    received: list[int] = []
    before = {signum: signal.getsignal(signum) for signum in _ours()}
    if before.get(signal.SIGHUP) is signal.SIG_IGN:  # under nohup it stays ignored
        del before[signal.SIGHUP]
    for signum in before:
        signal.signal(signum, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def at_once(save: Callable[[], bool]) -> None:
    """Run `save` in a thread as soon as a stop signal comes, even if the main thread is in a call
    that does not return. `save` returns whether all finished work is on disk, and must not raise.
    Call this once, in the main thread, after `install`."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # Python writes signal numbers

    def listen() -> None:
        while os.read(reader, 1)[0] not in STOP_SIGNALS:
            pass
        if save():
            heartbeat.note_saved()

    threading.Thread(target=listen, daemon=True).start()


def stop_requested(dist: Dist) -> bool:
    """True on every rank once any rank was asked to stop. Collective: if each rank checked only its
    own flag, they would leave at different iterations and hang each other."""
    return dist.any(stop_received())


def stop_received() -> bool:
    """Whether THIS rank was asked to stop; call `stop_requested` next, to tell the other ranks."""
    return bool(_received_s)


def die_with_parent() -> None:
    """Have Linux send this process SIGTERM when its parent dies, however it dies."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before `prctl` took effect
        os.kill(os.getpid(), signal.SIGTERM)


def _ours() -> list[int]:
    """The stop signals, without those whose handler was installed by C code."""
    return [signum for signum in STOP_SIGNALS if signal.getsignal(signum) is not None]


def _handle(signum: int, _: FrameType | None) -> None:
    is_new, now_s = signum not in _received_s, time.monotonic()
    since_s = now_s - _received_s.setdefault(signum, now_s)
    if is_new:
        # os.write: print is not re-entrant, and the signal may have interrupted one.
        hint = "; send it again to exit at once" if signum in END_IF_REPEATED else ""
        with suppress(OSError):
            os.write(2, f"\n{name_of(signum)}: will save and leave{hint}\n".encode())
    elif signum in END_IF_REPEATED and since_s > ECHO_S:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
