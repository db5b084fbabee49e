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
from typing import Self

from tiny_world.judge_server import JudgeHandler, JudgeServer

MODEL = "stub-judge"


class _Handler(JudgeHandler):
    def complete(self, body: bytes) -> None:
        """Questions hold pictures of half a megabyte: only their hash is looked at."""
        judge = self.server.judge
        assert isinstance(judge, SlowJudge)
        with judge.seats:
            time.sleep(judge.latency_s)
        digest = hashlib.sha256(body).digest()
        reply = json.dumps({"reasoning": "drawn", "score": [digest[0] % 11, digest[1] % 11]})
        message = {"role": "assistant", "content": reply}
        self.send(200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


class SlowJudge(JudgeServer):
    """Sleeps, then draws lots."""

    handler = _Handler

    def __init__(self, latency_s: float, cap: int) -> None:
        self.latency_s = latency_s
        self.seats = threading.Semaphore(cap)
        super().__init__(MODEL)
        # A worker that is stopped hangs up on the questions it has asked.
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]


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
