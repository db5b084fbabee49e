"""Compares expressions in a process that is allowed to die (`maths_worker.py`).

math-verify bounds its time by signals, which work in a main thread alone, and nothing bounds a
power tower in C.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Literal, cast

from rl.text.scrub import environment_without

Verdict = Literal["readable", "unreadable_gold", "equal", "different", "too_costly"]

START_TIMEOUT_S = 300.0
REMEMBERED_QUESTIONS = 8192


class MathsProcess:
    """Answers from one worker process, to one thread."""

    def __init__(self, cpu_s: int) -> None:
        """Starts the worker, and does not wait for it. `cpu_s`: CPU time per question, s."""
        self._cpu_s = cpu_s
        self._process, self._is_ready = _start(), False
        # What a group agrees on is asked once.
        self.compare = lru_cache(REMEMBERED_QUESTIONS)(self._compare)

    def close(self) -> None:
        """Also if it has ended already; the next question starts another."""
        with self._process:  # waits for its end, and closes the pipes
            self._process.kill()

    def _compare(self, gold: str, answer: str | None) -> Verdict:
        """The verdict on two LaTeX expressions; without an answer, whether the gold can be read.

        A worker that dies over a question found it too costly. Raises TimeoutError when the machine
        is too busy to answer, RuntimeError when no worker can be started.
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
            reply = self._read_line(30.0 + 20 * self._cpu_s)
        except BrokenPipeError:
            reply = ""
        except TimeoutError:
            self.close()
            raise
        if not reply:
            self.close()
        return cast(Verdict, reply or "too_costly")

    def _read_line(self, timeout_s: float) -> str:
        """The worker's next line; '' when it has died. Raises TimeoutError."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise TimeoutError(f"no word within {timeout_s:.0f} s")
        return self._process.stdout.readline().decode().strip()


def _start() -> subprocess.Popen[bytes]:
    # -P: this folder is no place to import from; it has a `format.py`.
    script = Path(__file__).with_name("maths_worker.py")
    return subprocess.Popen(
        [sys.executable, "-P", str(script)],
        env=environment_without(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
