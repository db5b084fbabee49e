"""Being asked to stop: SIGTERM, SIGINT and SIGHUP set a flag; the loop looks at it between phases,
saves and leaves. What must not wait for that runs `at_once`. SIGHUP is one of them because the
launcher forwards a lost terminal as such."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from rl.ranks import heartbeat
from rl.ranks.dist import Dist

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ECHO_S = 3.0
"""Ctrl-C reaches a rank twice within milliseconds (from the terminal and from the launcher), and a
dying launcher sends one more; only a signal later than this after the first means impatience."""
_PR_SET_PDEATHSIG = 1


_first_s: float | None = None
"""When this process heard the first."""


def install() -> None:
    """Take over the stop signals, and ask for one when the launcher dies. Main thread, once, early.

    The first signal sets the flag. One more, at least `ECHO_S` later, ends the process at once.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, _handle)
    die_with_parent()


def at_once(act: Callable[[], None]) -> None:
    """Have `act` called in a thread of its own once this process is asked to stop, even while the
    main thread is in a call that does not return (a collective whose peer is gone). Main thread,
    after `install`, once; `act` must not raise."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)  # Python writes each signal's number

    def listen() -> None:
        while os.read(heard, 1)[0] not in STOP_SIGNALS:
            pass
        act()
        heartbeat.note_saved()

    threading.Thread(target=listen, daemon=True).start()


def stop_requested(dist: Dist) -> bool:
    """True on every rank once any rank was asked to stop.

    Collective, at the price of one small message: ranks that look at their own flag only would
    leave at different iterations and hang each other.
    """
    return dist.any(stop_heard())


def stop_heard() -> bool:
    """Whether THIS rank was asked to stop, for leaving a long stretch without collectives early;
    `stop_requested` must follow, to tell the others."""
    return _first_s is not None


def die_with_parent() -> None:
    """Have Linux send this process SIGTERM when its parent dies, however it dies."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the request was placed
        os.kill(os.getpid(), signal.SIGTERM)


def _handle(signum: int, _: FrameType | None) -> None:
    global _first_s
    name = signal.Signals(signum).name
    if _first_s is None:
        _first_s = time.monotonic()
        # os.write: print is not re-entrant, and the signal may have interrupted one.
        os.write(2, f"\n{name}: will save and leave; once more to leave at once\n".encode())
    elif time.monotonic() - _first_s > ECHO_S:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
