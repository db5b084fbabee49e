"""Asks a vision-language judge over HTTP, and tells a judge's failure from a bad grade.

Trouble that passes becomes an `Answer` without a value; trouble that needs a person
(`JudgeRefused`) stops the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from weakref import WeakValueDictionary

from rl.api.judge import Answer, Question
from rl.config.schema import JudgeConfig
from rl.judge.endpoint import auth_header, remedy_for
from rl.judge.http import (
    MAX_ERROR_PAGE_BYTES,
    SHOWN_HEADER_CHARS,
    HttpAnswer,
    JudgeHttp,
    RequestTrouble,
)
from rl.judge.journal import ReplyJournal
from rl.judge.question import PartEncoder
from rl.judge.reply import UnreadableReplyError, chat_content, served_models
from rl.judge.retry import Breaker, OutageError, backoff_s, retry_after_s
from rl.record.scrub import scrub
from rl.record.untrusted import shown

T = TypeVar("T")

HEALTH_TIMEOUT_S = 10.0
RETRY_TEMPERATURE_STEP = 0.3
SEEDS_PER_REPEAT = 1000
SHOWN_BODY_CHARS = 600
SHOWN_NAME_CHARS = 100
REFUSED_QUESTION = frozenset({400, 413, 415, 422})
CONTENT = "<content>"
"""Stands in a request for the question's parts, until they are put in."""
RETRIED_CLIENT_ERRORS = frozenset({408, 425, 429})

log = logging.getLogger(__name__)


class JudgeError(RuntimeError):
    """The judge cannot be used as it is configured; a person must act."""


class JudgeRefused(JudgeError):  # noqa: N818 (reads as what happened)
    """The endpoint answers, and says no: wrong key, path, model, or request."""


class JudgeUnreachableError(JudgeError):
    """Nothing answers there."""


@dataclass
class JudgeStats:
    """What the client did since the last `take_stats()`."""

    requests: int = 0
    """Requests sent."""
    reused: int = 0
    """Replies taken from the journal instead."""
    retries: Counter[str] = field(default_factory=Counter)
    """Requests repeated, by the cause word."""
    latencies_s: list[float] = field(default_factory=list)
    """Send to reply, of each request that got one, s."""
    max_in_flight: int = 0
    """Most requests open at one time."""
    breaker_openings: int = 0


class JudgeClient:
    """One connection pool for the process. All coroutines must run in one event loop.

    Never pickled (it holds the key), and its repr shows the address only.
    """

    def __init__(self, config: JudgeConfig, api_base: str, journal: Path | None = None) -> None:
        """`api_base`: from `resolve_api_base`. `journal`: JSONL of replies, read now and extended.

        Raises ValueError when the environment lacks the key that `config.api_key_env` names.
        """
        self.config = config
        self.api_base = api_base
        # By context: a coroutine has that of the thread which submitted it, as it was then.
        self._journal: ContextVar[ReplyJournal | None] = ContextVar("journal", default=None)
        self._open_journals: list[ReplyJournal] = []
        if journal:
            self.open_journal(journal)
        self._stats = JudgeStats()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_flight = 0
        self._answered: set[tuple[bool, ...]] = set()
        """Shapes of question (True: a text, False: a picture) that got an answer."""
        # Jitter must not draw from the run's random numbers: a retry would change the training.
        self._jitter = random.Random()
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._parts = PartEncoder(config.image_side_px)
        self._breaker = Breaker(
            config.breaker_failures, config.breaker_pause_s, config.max_outage_s
        )
        self._http = JudgeHttp(api_base, auth_header(config.api_key_env), config.max_concurrency)

    def __repr__(self) -> str:
        return f"JudgeClient({self.api_base!r}, model={self.config.model!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a JudgeClient holds a key and sockets: make one per process instead")

    def open_journal(self, path: Path) -> None:
        """Continue with another journal, e.g. one per iteration, in whatever this thread submits
        from now on. What it submitted before keeps its own until the next call."""
        if len(self._open_journals) > 1:
            self._open_journals.pop(0).close()
        self._open_journals.append(ReplyJournal(path))
        self._journal.set(self._open_journals[-1])

    def take_stats(self) -> JudgeStats:
        """What happened since the last call; a request under way counts when it ends."""
        taken, self._stats = self._stats, JudgeStats()
        taken.breaker_openings = self._breaker.num_openings
        self._breaker.num_openings = 0
        return taken

    async def aclose(self) -> None:
        await self._http.aclose()
        for journal in self._open_journals:
            journal.close()

    async def check_health(self, wait_s: float = 60.0) -> None:
        """Prove that the endpoint is there and serves the model, or say what is wrong.

        A server that is still starting has `wait_s` (and one more request) to answer. Raises
        `JudgeUnreachableError` or `JudgeRefused`.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                response = await self._exchange("GET", "/models", None, HEALTH_TIMEOUT_S)
                if response.status in RETRIED_CLIENT_ERRORS:
                    raise self._passing(response)
                break
            except RequestTrouble as trouble:
                if time.monotonic() >= deadline:
                    raise JudgeUnreachableError(
                        f"no judge at {self.api_base} after {wait_s:.0f} s ({trouble}): start it "
                        "(scripts/serve_judge.sh), or set judge.api_base to where it runs"
                    ) from None
            await asyncio.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
        if response.status != 200:
            self._refuse(response)
        served = None if response.unusable else served_models(response.body)
        if served is None:
            raise JudgeRefused(
                f"{self.api_base}/models answers, but not as an OpenAI-compatible endpoint: "
                f"{self._shown(response)}\nCheck judge.api_base."
            )
        if self.config.model not in served:
            names = ", ".join(self._safe(name, SHOWN_NAME_CHARS) for name in served[:10])
            raise JudgeRefused(
                f"{self.api_base} does not serve judge.model={self.config.model!r}; it serves: "
                f"{names or 'nothing'}. Set judge.model to one of these."
            )

    async def ask(
        self, question: Question, parse: Callable[[str], T], repeat: int = 0
    ) -> Answer[T]:
        """Ask until `parse` can read a reply, within the bounds of the config.

        `parse` raises `UnreadableReplyError` on what it cannot read. `repeat` tells equal questions
        apart that are asked several times to be averaged. Raises `JudgeRefused`; every other
        trouble is an `Answer` with a failure.

        A question keeps its slot while it backs off, so a judge in trouble sees fewer requests.
        """
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise RuntimeError(
                "a JudgeClient lives in one event loop: use one BackgroundLoop for it"
            )
        self._loop = loop
        started = time.monotonic()
        async with self._slots:
            value, replies, failure, attempts = await self._ask(question, parse, repeat)
        return Answer(value, tuple(replies), failure, attempts, time.monotonic() - started)

    async def _ask(
        self, question: Question, parse: Callable[[str], T], repeat: int
    ) -> tuple[T | None, list[str], str | None, int]:
        content = [await self._parts.encode(part) for part in question.parts]
        shape = tuple(isinstance(part, str) for part in question.parts)
        replies: list[str] = []
        num_sent = num_tries = 0
        while True:
            body = self._body(content, question, repeat, num_unreadable=len(replies))
            try:
                reply, was_sent = await self._reply(body, shape)
            except OutageError as outage:
                return None, replies, f"outage: {outage}", num_sent
            except RequestTrouble as trouble:
                num_sent += 1
                failure, cause = str(trouble), trouble.cause
                if cause == "refused":
                    return None, replies, failure, num_sent
                # In an outage no try is used up: the breaker sets the pace, `max_outage_s` the end.
                if not self._is_outage(cause, num_tries + 1):
                    num_tries += 1
                pause_s = trouble.retry_after_s or 0.0
                pause_s += backoff_s(self.config.backoff_s, max(1, num_tries), self._jitter)
            else:
                num_sent += was_sent
                num_tries += 1
                replies.append(reply)
                try:
                    return parse(reply), replies, None, num_sent
                except UnreadableReplyError as error:
                    failure, cause, pause_s = f"unreadable: {error}", "unreadable", 0.0
            if num_tries >= self.config.max_attempts:
                return None, replies, f"{failure} ({num_tries} tries)", num_sent
            self._stats.retries[cause] += 1
            if not self._breaker.is_open:
                await asyncio.sleep(pause_s)

    def _is_outage(self, cause: str, num_tries: int) -> bool:
        """Whether the last failure says nothing about the question itself.

        A question whose every try died without an answer, while nobody else got one either, opens
        the breaker too: with few questions in flight the row would else end them one by one.
        """
        is_last_try = num_tries >= self.config.max_attempts
        nobody_got_through = self._breaker.num_failures_in_row >= num_tries
        if self._breaker.is_open:
            return True
        if cause in ("timeout", "transport") and is_last_try and nobody_got_through:
            self._breaker.open()
        return self._breaker.is_open

    def _body(
        self, content: Sequence[bytes], question: Question, repeat: int, num_unreadable: int
    ) -> bytes:
        """The request. Another seed, and a higher temperature, after each unreadable reply."""
        temperature = question.temperature
        if temperature is None:
            temperature = self.config.temperature
        body: dict[str, Any] = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": [CONTENT]}],
            "max_tokens": self.config.max_tokens,
            "temperature": round(temperature + RETRY_TEMPERATURE_STEP * min(num_unreadable, 3), 3),
            # Some models' own defaults (top_p 0.001) would make temperature and seed do nothing.
            "top_p": 1.0,
            "seed": SEEDS_PER_REPEAT * repeat + num_unreadable,
        }
        guided = self.config.guided_json
        if guided == "always" or (guided == "on_retry" and num_unreadable > 0):
            schema = {"name": "grade", "schema": question.reply_schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        # Pictures are megabytes: they are put in as they are, not escaped again for each question.
        before, _, after = json.dumps(body).encode().partition(json.dumps(CONTENT).encode())
        return b"".join([before, b", ".join(content), after])

    async def _reply(self, body: bytes, shape: tuple[bool, ...]) -> tuple[str, bool]:
        """The judge's words, and whether a request was needed for them.

        Equal requests wait for each other: whoever comes second finds the first one's reply, as it
        would after a restart. (Without a journal each is sent.)
        """
        journal = self._journal.get()
        if journal is None:
            return await self._send(body, shape), True
        key = hashlib.sha256(body).hexdigest()
        async with self._asking.setdefault(key, asyncio.Lock()):
            reply = journal.get(key)
            if reply is not None:
                self._stats.reused += 1
                return reply, False
            reply = await self._send(body, shape)
            journal.put(key, reply)
            return reply, True

    async def _send(self, body: bytes, shape: tuple[bool, ...]) -> str:
        is_probe = await self._breaker.admit()
        try:
            started = time.monotonic()
            timeout_s = self.config.timeout_s
            response = await self._exchange("POST", "/chat/completions", body, timeout_s)
            self._stats.latencies_s.append(time.monotonic() - started)
        except RequestTrouble:
            self._breaker.failed(is_probe)
            raise
        finally:
            self._breaker.release(is_probe)
        self._breaker.succeeded()
        return self._read(response, shape)

    async def _exchange(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> HttpAnswer:
        """One request. Raises `RequestTrouble` when nobody is there to answer: also for 5xx."""
        self._stats.requests += 1
        self._in_flight += 1
        self._stats.max_in_flight = max(self._stats.max_in_flight, self._in_flight)
        try:
            response = await self._http.request(method, path, body, timeout_s)
        finally:
            self._in_flight -= 1
        if response.status >= 500:
            raise self._passing(response)
        return response

    def _read(self, response: HttpAnswer, shape: tuple[bool, ...]) -> str:
        status = response.status
        if status in RETRIED_CLIENT_ERRORS:
            raise self._passing(response)
        if status in REFUSED_QUESTION and shape in self._answered:
            # It has graded others like this, so the set-up is right: this one is too long, or
            # moderated. (A judge may take one picture and refuse two: that is the set-up.)
            raise RequestTrouble("refused", f"HTTP {status} {self._shown(response)}")
        if status != 200:
            self._refuse(response)
        if response.unusable:
            raise RequestTrouble("unreadable", f"HTTP 200 with a body {response.unusable}")
        try:
            reply = chat_content(response.body)
        except UnreadableReplyError as error:
            detail = f"HTTP 200 without a reply ({error}): {self._shown(response)}"
            raise RequestTrouble("unreadable", detail) from None
        self._answered.add(shape)
        return reply

    def _passing(self, response: HttpAnswer) -> RequestTrouble:
        pause_s = retry_after_s(response.retry_after)
        return RequestTrouble(f"http_{response.status}", self._shown(response), pause_s)

    def _refuse(self, response: HttpAnswer) -> NoReturn:
        location = response.location and self._safe(response.location, SHOWN_HEADER_CHARS)
        raise JudgeRefused(
            f"the judge refused: {response.request} -> HTTP {response.status} "
            f"{self._shown(response)}\n"
            f"{remedy_for(response.status, location, self.config)}"
        )

    def _shown(self, response: HttpAnswer) -> str:
        """The body's beginning, or why there is none. Endpoints echo wrong keys in it."""
        if response.unusable and (response.status == 200 or not response.body):
            return f"(a body {response.unusable})"
        body = response.body[:MAX_ERROR_PAGE_BYTES].decode("utf-8", "replace")
        return self._safe(body, SHOWN_BODY_CHARS) or "(empty body)"

    def _safe(self, text: str, max_chars: int) -> str:
        return shown(scrub(text, (self.config.api_key_env,)), max_chars)
