"""A judge of known latency in a separate process, whose CPU seconds are not measured."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from tiny_world.judge_server import JudgeHandler, JudgeServer


class _Handler(JudgeHandler):
    def complete(self, body: bytes) -> None:
        """Replies with scores from a hash of the body, without parsing its large pictures."""
        judge = self.server.judge
        assert isinstance(judge, SlowJudge)
        time.sleep(judge.latency_s)
        digest = hashlib.sha256(body).digest()
        self.say(json.dumps({"reasoning": "drawn", "score": [digest[0] % 11, digest[1] % 11]}))


class SlowJudge(JudgeServer):
    """The tiny world's HTTP server with a delay and scores from a hash."""

    handler = _Handler

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s
        super().__init__("stub-judge")
        # No error is printed if a worker stops and closes connections with open questions.
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]


def _serve(connection: Connection, latency_s: float) -> None:
    with SlowJudge(latency_s) as judge:
        connection.send(judge.api_base)
        connection.recv()


@contextmanager
def judge_process(latency_s: float = 0.0) -> Iterator[str]:
    """The `api_base` of a judge that answers any number of questions at once after `latency_s`."""
    spawn = multiprocessing.get_context("spawn")
    connection, judge_end = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(judge_end, latency_s), daemon=True)
    process.start()
    try:
        yield connection.recv()
    finally:
        connection.send(None)
        process.join(10)
