"""A judge on loopback with scripted faults, over real sockets and HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from rl.api.judge import Answer, Question
from rl.config.schema import JudgeConfig
from rl.judge.client import JudgeClient, JudgeStats
from rl.judge.reply import read_scores, scores_schema
from tiny_world.judge_server import JudgeHandler, JudgeServer

MODEL = "tiny-judge"
GOOD = '{"reasoning": "fine", "score": [8, 6.5]}'


@dataclass(frozen=True)
class Fault:
    """The response to one request, by default a good reply."""

    status: int = 200
    reply: str = GOOD
    """The judge's reply, sent in a valid JSON body."""
    body: str | None = None
    """Replaces the whole HTTP body."""
    headers: dict[str, str | Callable[[], str]] = field(default_factory=dict)
    """A callable is called when the request has arrived."""
    stall_s: float = 0.0
    """Pause before the response, s."""
    reset: bool = False
    """Reset the connection without a response."""
    raw: Callable[[], Iterable[bytes]] | None = None
    """Replaces the whole response, status line included, block by block."""
    keeps_open: bool = False
    """Keep the connection open after `raw`."""


class FaultyJudge(JudgeServer):
    """Serves `faults` one per request, then `after`; records the requests."""

    def __init__(self, faults: Sequence[Fault] = (), after: Fault | None = None) -> None:
        self.faults = list(faults)
        self.after = after or Fault()
        self.models: Fault | None = None
        """Replaces the response to `/v1/models`."""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.max_open = 0
        self._open = 0
        self._lock = threading.Lock()
        super().__init__(MODEL)

    def client(self, journal: Path | None = None, **config: Any) -> JudgeClient:
        """A client of this judge; `config`: changes of `quick_config`."""
        return client_of(self, journal, **config)

    def works(self) -> None:
        """From now on all its responses are good."""
        self.after, self.models = Fault(), None

    def begin(self, body: bytes, headers: dict[str, str]) -> Fault:
        with self._lock:
            self._open += 1
            self.max_open = max(self.max_open, self._open)
            self.requests.append(json.loads(body))
            self.headers.append(headers)
            return self.faults.pop(0) if self.faults else self.after

    def end(self) -> None:
        with self._lock:
            self._open -= 1


class _FaultyHandler(JudgeHandler):
    def do_GET(self) -> None:
        judge: Any = self.server.judge
        if judge.models is None:
            return super().do_GET()
        self._play(judge.models)
        self.close_connection = True

    def complete(self, body: bytes) -> None:
        judge: Any = self.server.judge
        self._play(judge.begin(body, dict(self.headers)))
        judge.end()

    def _play(self, fault: Fault) -> None:
        time.sleep(fault.stall_s)
        try:
            self._respond(fault)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _respond(self, fault: Fault) -> None:
        if fault.raw is not None:
            self.close_connection = not fault.keeps_open
            self.wfile.writelines(fault.raw())
            return
        if fault.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            raise ConnectionResetError
        data = envelope(fault.reply) if fault.body is None else fault.body.encode()
        self.send_response(fault.status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in fault.headers.items():
            self.send_header(name, value if isinstance(value, str) else value())
        self.end_headers()
        self.wfile.write(data)


FaultyJudge.handler = _FaultyHandler


class PickyJudge(FaultyJudge):
    """Refuses requests with certain parameters, naming one parameter at a time."""

    def __init__(
        self,
        *refused: str,
        status: int = 400,
        page: str = "Unsupported parameter: 'NAME' is not supported with this model.",
    ) -> None:
        """`page`: body of a refusal, in which NAME is replaced by the parameter."""
        self.refused, self.status, self.page = refused, status, page
        super().__init__()

    def begin(self, body: bytes, headers: dict[str, str]) -> Fault:
        fault = super().begin(body, headers)
        parameter = next((name for name in self.refused if name in json.loads(body)), None)
        if parameter is None:
            return fault
        self.faults.insert(0, fault)  # `faults` are for accepted requests
        return Fault(self.status, body=self.page.replace("NAME", parameter))

    def log(self) -> list[str]:
        """The optional parameters of each request."""
        return [" ".join(sorted(r.keys() - {"model", "messages"})) for r in self.requests]


def raw(*blocks: bytes) -> Fault:
    """Sends these bytes and closes the connection."""
    return Fault(raw=lambda: blocks)


def page(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> Fault:
    """An HTTP response of any server. "Connection: close" keeps the client from sending the next
    question on a connection that is just being closed. `length`: the claimed Content-Length."""
    lines = [f"HTTP/1.1 {status}", *headers, "Connection: close"]
    lines.append(f"Content-Length: {len(body) if length is None else length}")
    return raw("\r\n".join([*lines, "", ""]).encode("latin-1"), body)


def dripping(block: bytes, start: bytes = b"") -> Fault:
    """`start`, then `block` every 20 ms without end: each read is quick, the response endless."""

    def blocks() -> Iterator[bytes]:
        yield start
        while True:
            time.sleep(0.02)
            yield block

    return Fault(raw=blocks)


def envelope(content: Any = GOOD) -> bytes:
    """A chat completion."""
    return json.dumps({"choices": [{"message": {"content": content}}]}).encode()


def first_token(*logprobs: tuple[str, Any]) -> str:
    """A chat completion of the first of these tokens, with the log-probs of all."""
    entries = [{"token": token, "logprob": logprob} for token, logprob in logprobs]
    content = [{**entries[0], "top_logprobs": entries}]
    message = {"role": "assistant", "content": entries[0]["token"]}
    return json.dumps({"choices": [{"message": message, "logprobs": {"content": content}}]})


def quick_config(**changes: Any) -> JudgeConfig:
    """A config with short pauses instead of minutes; its time-out suffices on a busy machine."""
    quick = {"timeout_s": 5.0, "max_outage_s": 5.0}
    return JudgeConfig(**{"model": MODEL, **quick, **changes})


def pair_question(*parts: str | Image.Image) -> Question:
    return Question(parts or ("how good?",), scores_schema(2, 10))


def read_pair(text: str) -> tuple[float, float]:
    first, second = read_scores(text, 2, 0, 10)
    return first, second


def client_of(
    judges: FaultyJudge | str | Sequence[FaultyJudge | str],
    journal: Path | None = None,
    **config: Any,
) -> JudgeClient:
    """A client of one or several judges; `config`: changes of `quick_config`."""
    listed = [judges] if isinstance(judges, FaultyJudge | str) else judges
    urls = [judge if isinstance(judge, str) else judge.api_base for judge in listed]
    client = JudgeClient(quick_config(**config), urls)
    if journal:
        client.open_journal(journal)
    return client


def used(client: JudgeClient, script: Callable[[JudgeClient], Awaitable[Any]]) -> Any:
    """What `script` returns; closes the client afterwards."""

    async def run() -> Any:
        try:
            return await script(client)
        finally:
            await client.aclose()

    return asyncio.run(run())


def with_client(
    judges: FaultyJudge | str | Sequence[FaultyJudge | str],
    script: Callable[[JudgeClient], Awaitable[Any]],
    journal: Path | None = None,
    **config: Any,
) -> tuple[Any, JudgeClient]:
    """(what `script` returns, the client, which is closed afterwards)"""
    client = client_of(judges, journal, **config)
    return used(client, script), client


async def ask_all(client: JudgeClient, count: int, first: int = 0) -> list[Answer[Any]]:
    """Asks `count` different questions at once."""
    numbers = range(first, first + count)
    return list(
        await asyncio.gather(*(client.ask(pair_question(str(n)), read_pair) for n in numbers))
    )


def ask_one(judge: FaultyJudge, **config: Any) -> tuple[Answer[Any], JudgeStats]:
    """(the answer to one question, the client's counts)"""
    [answer], client = with_client(judge, lambda client: ask_all(client, 1), **config)
    return answer, client.take_stats()


async def ask_in_turn(
    client: JudgeClient, questions: Iterable[Question], repeat: int = 0
) -> list[Answer[Any]]:
    return [await client.ask(question, read_pair, repeat) for question in questions]


def answers_of(
    client: JudgeClient, questions: Iterable[Question], repeat: int = 0
) -> list[Answer[Any]]:
    """The answers to the questions, asked one after the other; closes the client afterwards."""
    return used(client, lambda client: ask_in_turn(client, questions, repeat))
