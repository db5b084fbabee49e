"""A judge of known slowness, in a process of its own, so that its work is on nobody's bill.

What: the HTTP of the tiny world's judge, answering after `latency_s` with at most `cap` questions
at work, with scores drawn from a hash of the question. What not: judging. Started by `contest.py`.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from rl.tiny_world.judge_server import JudgeServer

MODEL = "stub-judge"


class SlowJudge(JudgeServer):
    """Sleeps, then draws lots."""

    def __init__(self, latency_s: float, cap: int) -> None:
        self._latency_s = latency_s
        self._seats = threading.Semaphore(cap)
        super().__init__(MODEL)
        # A worker that is stopped hangs up on the questions it has asked.
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]

    def answer(self, parts: list[dict[str, Any]]) -> str:
        with self._seats:
            time.sleep(self._latency_s)
        digest = hashlib.sha256(json.dumps(parts).encode()).digest()
        return json.dumps({"reasoning": "drawn", "score": [digest[0] % 11, digest[1] % 11]})


def _serve(connection: Connection, latency_s: float, cap: int) -> None:
    with SlowJudge(latency_s, cap) as judge:
        connection.send(judge.api_base)
        connection.recv()


class JudgeProcess:
    """`api_base` answers between `with` and its end."""

    def __init__(self, latency_s: float = 0.0, cap: int = 64) -> None:
        """`cap`: questions at work at one time."""
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, latency_s, cap), daemon=True)
        self._process.start()
        self.api_base: str = self._connection.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.send(None)
        self._process.join(10)
