"""A judge of known slowness, in a process of its own, so that its work is on nobody's bill.

The HTTP of the tiny world's judge; scores are drawn from a hash of the question.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from tiny_world.judge_server import JudgeHandler, JudgeServer

MODEL = "stub-judge"


class _Handler(JudgeHandler):
    def complete(self, body: bytes) -> None:
        """Questions hold pictures of half a megabyte: only their hash is looked at."""
        judge = self.server.judge
        assert isinstance(judge, SlowJudge)
        time.sleep(judge.latency_s)
        digest = hashlib.sha256(body).digest()
        self.say(json.dumps({"reasoning": "drawn", "score": [digest[0] % 11, digest[1] % 11]}))


class SlowJudge(JudgeServer):
    """Sleeps, then draws lots."""

    handler = _Handler

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s
        super().__init__(MODEL)
        # A worker that is stopped hangs up on the questions it has asked.
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]


def _serve(connection: Connection, latency_s: float) -> None:
    with SlowJudge(latency_s) as judge:
        connection.send(judge.api_base)
        connection.recv()


@contextmanager
def judge_process(latency_s: float = 0.0) -> Iterator[str]:
    """The `api_base` of a judge that answers after that long, as many questions at a time as
    come."""
    spawn = multiprocessing.get_context("spawn")
    connection, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, latency_s), daemon=True)
    process.start()
    try:
        yield connection.recv()
    finally:
        connection.send(None)
        process.join(10)
