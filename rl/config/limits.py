"""Evaluates a config within limits of time, memory and size, in a forked child: Jsonnet is C++ that
no signal interrupts. Windows has no fork, and no limits."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

MAX_S = 30.0
"""Of CPU time, so that a machine busy with something else refuses nobody; a config takes a fifth of
a second."""
MAX_WAIT_S = 600.0
"""By the clock: an import from a disk that does not answer takes no CPU time."""
MAX_MEMORY_BYTES = 2 << 30
"""Beside what the process has."""
MAX_RESULT_BYTES = 16 << 20


class RunawayError(Exception):
    """It was stopped at one of the limits; the text does not name what was evaluated."""


def within_limits(evaluate: Callable[[], str]) -> str:
    """What `evaluate` returns, which is ASCII and which it does by itself: of the process it is
    called in it sees a copy. Raises RunawayError where it was stopped."""
    if not hasattr(os, "fork"):
        return evaluate()
    answers, answer = os.pipe()
    child = os.fork()
    if child == 0:
        _evaluate_in_child(evaluate, answer)
    os.close(answer)
    try:
        received, problem = _receive(answers)
    finally:
        os.close(answers)
        os.kill(child, signal.SIGKILL)  # not yet waited for: the number is still its own
        status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        problem = f"took longer than {MAX_S:g} s: a recursion or a list without end?"
    if not problem and not received:
        problem = (
            f"was ended at {MAX_MEMORY_BYTES / 1e9:.0f} GB of memory: a string, list or recursion "
            "without end?"
        )
    if problem:
        raise RunawayError(f"evaluating it {problem}")
    return received.decode("ascii")


def _receive(answers: int) -> tuple[bytes, str]:
    """(all that the child says, '') or (some of it, why it is not waited for any longer)."""
    deadline = time.monotonic() + MAX_WAIT_S
    received = bytearray()
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([answers], [], [], left)[0]:
            return b"", f"gave nothing in {MAX_WAIT_S:g} s: a disk that does not answer?"
        part = os.read(answers, 1 << 20)
        if not part:
            return bytes(received), ""
        received += part
        if len(received) > MAX_RESULT_BYTES:
            return b"", f"gives more than {MAX_RESULT_BYTES / 1e6:.0f} MB, which no config has"


def _evaluate_in_child(evaluate: Callable[[], str], answer: int) -> NoReturn:
    """Nothing comes where memory ends."""
    try:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # C++ tells of its end there
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, MAX_S)  # the kernel ends it, in the middle of C++ too
        if sys.platform == "linux":
            _limit_memory()
        said = evaluate().encode("ascii")
        while said:
            said = said[os.write(answer, said) :]
    finally:
        os._exit(0)


def _limit_memory() -> None:
    import resource

    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = now + MAX_MEMORY_BYTES
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
