"""Compares LaTeX expressions with math-verify in a worker process, which may hang or die."""

from __future__ import annotations

import json
import logging
import os
import resource
import selectors
import signal
import subprocess
import sys
from functools import lru_cache
from typing import Any, Literal, cast

Verdict = Literal["unreadable_gold", "equal", "different", "too_costly"]
"""'unreadable_gold': the gold cannot be parsed; 'too_costly': the worker died of it."""

START_TIMEOUT_S = 300.0
EXIT_S = 10.0
REMEMBERED_QUESTIONS = 8192
MEMORY_BYTES = 2 * 2**30
TINY = 1e-5
"""Numbers below it, which math-verify's six decimals make equal, are equal only up to this relative
difference."""


class MathsProcess:
    """Client of one worker process, for use by one thread.

    math-verify limits its time with signals, which work only in a main thread and do not stop C
    code (a power tower). So the worker is this file run as a script, and the kernel kills it when a
    comparison takes more than `cpu_s`. It reads JSON lines `{"gold": ..., "answer": ..., "cpu_s":
    ...}` and replies to each with a `Verdict`. Nothing is evaluated as Python.
    """

    def __init__(self, cpu_s: int) -> None:
        """Starts the worker without waiting for it. `cpu_s`: CPU time per question, s."""
        self._cpu_s = cpu_s
        self._reply_timeout_s = 30.0 + 20 * cpu_s  # wall time, on a busy machine
        self._process, self._is_ready = _start(), False
        # Equal answers within a group are compared once.
        self.compare = lru_cache(REMEMBERED_QUESTIONS)(self._compare)

    def close(self) -> None:
        """End the worker, which may have ended already; the next question starts a new one."""
        with self._process:  # waits for its end, and closes the pipes
            self._process.kill()

    def _compare(self, gold: str, answer: str) -> Verdict:
        """The verdict on two LaTeX expressions.

        'too_costly' if the worker dies of the question. Raises TimeoutError if the machine is too
        busy to reply, RuntimeError if the worker cannot be started or is killed from outside.
        """
        if self._process.poll() is not None:  # closed, or dead between questions
            self.close()
            self._process, self._is_ready = _start(), False
        if not self._is_ready and self._read_line(START_TIMEOUT_S) != "ready":
            raise RuntimeError(
                "the process that compares answers did not start (its error is in the log): is "
                "math-verify installed? (pip install 'vlm-edit-rl[train]')"
            )
        self._is_ready = True
        question = {"gold": gold, "answer": answer, "cpu_s": self._cpu_s}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            reply = self._read_line(self._reply_timeout_s)
        except BrokenPipeError:
            reply = ""
        except TimeoutError:
            self.close()
            raise
        if not reply:
            ended = self._process.wait(EXIT_S)  # before `close`, which would hide how it ended
            self.close()
            if ended == -signal.SIGKILL:
                raise RuntimeError(
                    "the process that compares answers was killed (for want of memory?)"
                )
        return cast(Verdict, reply or "too_costly")

    def _read_line(self, timeout_s: float) -> str:
        """The worker's next line; '' when it has died. Raises TimeoutError."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise TimeoutError(f"no reply within {timeout_s:.0f} s")
        return self._process.stdout.readline().decode().strip()


def _start() -> subprocess.Popen[bytes]:
    from rl.printing import environment_without  # imported here: the worker may not find `rl`

    return subprocess.Popen(
        [sys.executable, "-P", __file__],  # -P: import nothing from this folder
        env=environment_without(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )


# --- in the worker --------------------------------------------------------------------------------


def main() -> None:
    """Reply to questions until the parent process closes stdin."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to stderr, not into the replies
    for stop in (signal.SIGINT, signal.SIGTERM):  # the run ends this worker after it has saved
        signal.signal(stop, signal.SIG_IGN)
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import math_verify  # noqa: F401 (takes seconds, which no question's time limit should include)

    print("ready", file=replies)
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, question["cpu_s"])  # SIGPROF ends the process
        verdict = verdict_on(question["gold"], question["answer"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(verdict, file=replies)


def verdict_on(gold: str, answer: str) -> Verdict:
    """The verdict on one question."""
    from math_verify import verify

    golds = read(gold)
    if not golds:
        return "unreadable_gold"
    answers = read(answer)
    same = bool(answers) and verify(golds, answers, timeout_seconds=None)
    return "equal" if same and not _both_tiny_and_unequal(golds[0], answers[0]) else "different"


def _both_tiny_and_unequal(gold: Any, answer: Any) -> bool:
    """math-verify rounds to six decimals, which makes all tiny numbers equal: 2^-100 and 2^-101."""
    if not (getattr(gold, "is_number", False) and getattr(answer, "is_number", False)):
        return False
    size, error = abs(gold.evalf()), abs((gold - answer).evalf())
    return bool(size < TINY and error > TINY * size) and not (gold - answer).equals(0)


def read(latex: str) -> list[Any]:
    """The parsed expression as a list of one; [] if it cannot be parsed."""
    from math_verify import LatexExtractionConfig, parse

    return parse(
        f"${latex}$",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=-1)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )


if __name__ == "__main__":
    main()
