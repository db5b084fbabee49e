"""Asks one or several judge endpoints until a reply can be read."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from weakref import WeakValueDictionary

from rl.api.judge import Answer, Question
from rl.api.types import is_unreadable
from rl.config.schema import JudgeConfig
from rl.judge.http import (
    CONTENT,
    LOGPROBS_REMEDY,
    SHOWN_HEADER_CHARS,
    TOO_MANY_REQUESTS,
    Dialect,
    HttpAnswer,
    JudgeHttp,
    ReplyJournal,
    Request,
    RequestTrouble,
    auth_header,
    in_words,
    refused_parameters,
    remedy_for,
)
from rl.judge.reply import (
    NoLogprobsError,
    UnreadableReplyError,
    encoded,
    read_chat,
    refuse_part,
    scores_of_ten,
    served_models,
)
from rl.printing import excerpt, scrub

# ---- addresses -----------------------------------------------------------------------------------
# The addresses of one judge. Each decides: ask, wait, probe, or give a question up.

log = logging.getLogger(__name__)

POLL_S = 0.2
BACKOFF_CAP_S = 30.0
QUIET_S = 10.0
"""A wait is not logged while its length so far plus the next pause is shorter than this."""
LINE_EVERY_S = 60.0
SILENCE = ("timeout", "transport")
"""Causes that say nothing about the question: the address sent no whole answer."""
FROM_A_WORKING_ADDRESS = frozenset({"http_408", "http_425", "http_429", "refused", "no_reply"})
"""Causes that do not count as a failure of the address."""


class OutageError(Exception):
    """No address has answered for longer than `max_outage_s`."""


def backoff_s(first_s: float, num_failures: int, rng: random.Random) -> float:
    """Pause after the n-th failure (n >= 1), s: uniform(0, min(30, first_s * 2^(n-1))).

    "Full jitter" (Brooker 2015, 'Exponential Backoff And Jitter'): clients that failed together do
    not come back together.
    """
    return rng.uniform(0.0, min(BACKOFF_CAP_S, first_s * 2.0 ** min(num_failures - 1, 16)))


@dataclass
class JudgeStats:
    """Counts since the last `take_stats()`."""

    requests: int = 0
    reused: int = 0
    """Replies taken from the journal, without a request."""
    retries: Counter[str] = field(default_factory=Counter)
    """Repeated requests by `RequestTrouble.cause`."""
    latencies_s: list[float] = field(default_factory=list)
    """Time from sending to the answer, s, of each request with an answer below status 500."""
    breaker_openings: int = 0
    throttled: int = 0
    """Requests that the judge asked to send later (HTTP 429, Retry-After)."""
    failed: Counter[str] = field(default_factory=Counter)
    """Questions given up: 'transport', or 'unreadable' (`rl.api.types.is_unreadable`)."""
    of_ten: list[float] = field(default_factory=list)
    """Scores whose range is 0 to 10."""
    other_model: int = 0
    """Replies that name a model other than `judge.model`."""
    prompt_tokens: int = 0
    """Of requests and their pictures, as far as the endpoint reports them."""
    completion_tokens: int = 0
    """Of the replies to these requests."""


@dataclass(eq=False)
class Asking:
    """A question that is being asked."""

    question: Question
    repeat: int = 0
    content: Sequence[bytes] = ()
    """JSON of its parts."""
    replies: list[str] = field(default_factory=list)
    """All replies so far: the unreadable ones, then the last one."""
    keys: list[str] = field(default_factory=list)
    """Journal keys of `replies`."""
    num_sent: int = 0
    num_failures: int = 0
    """Requests without a reply."""
    num_tries: int = 0
    """Replies, and failures that the question itself may have caused."""
    failing_since_s: float = math.inf
    """When its first request without a reply was sent, `time.monotonic`."""
    tried: set[Address] = field(default_factory=set)
    """Addresses where the question has failed since its last pause."""

    @property
    def shape(self) -> tuple[tuple[str, ...], tuple[bool, ...]]:
        """(the question's labels, for each part whether it is text)."""
        return self.question.labels, tuple(isinstance(p, str) for p in self.question.parts)


class Address:
    """One address, with a circuit breaker for its outages.

    Silence (no whole answer) opens the breaker after `breaker_failures` in a row. An HTTP 5xx may
    be the question's own fault, so before it opens the breaker, or a question is given up for it,
    the last request that got a reply is sent again: only if that fails, too, the breaker opens. An
    open breaker lets one probe through per `breaker_pause_s`, which is that request as well.
    """

    def __init__(self, judge: Addresses, url: str, name: str) -> None:
        """`name`: how log lines name the address."""
        self.url = url
        config = judge.config
        self.http = JudgeHttp(url, auth_header(config.api_key_env), config.max_concurrency)
        self.dialect = Dialect()
        self.answered: set[tuple[tuple[str, ...], tuple[bool, ...]]] = set()
        """Shapes of the questions that got an answer."""
        self.num_in_flight = 0
        self.rests_until = 0.0
        """End of the pause that its last Retry-After asked for, `time.monotonic`."""
        self.num_failures_in_row = 0
        self._judge = judge
        self._name = name
        self._probe_at_s: float | None = None
        """When the open breaker lets the next probe through; None: it is closed."""
        self._worked_at_s = 0.0
        self._silent_since_s = math.inf
        """When the first request since its last reply was sent that got none."""
        self._suspicion = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        return self._probe_at_s is not None

    @property
    def down_s(self) -> float:
        """Seconds since the first request was sent that got no reply, or since the last reply if
        that came later; 0 if the last request got one."""
        return max(0.0, time.monotonic() - self._silent_since_s)

    def order_for(self, asking: Asking) -> tuple[bool, bool, int]:
        """The question goes to the address that is up and lowest in this order."""
        return self in asking.tried, self.rests_until > time.monotonic(), self.num_in_flight

    def takes_probe(self) -> bool:
        """Whether the breaker is open and a probe is due; if so, the caller must send it."""
        now_s = time.monotonic()
        is_due = self._probe_at_s is not None and now_s >= self._probe_at_s
        if is_due:
            self._probe_at_s = now_s + self._judge.config.breaker_pause_s
        return is_due

    def works(self, is_reply: bool = True) -> None:
        """Note an answer that shows that the address works; closes the breaker. `is_reply`: False
        if it only asked to wait."""
        if self.is_open:
            log.warning("%s answers again after %.0f s", self._name, self.down_s)
        self.num_failures_in_row, self._probe_at_s = 0, None
        self._worked_at_s = time.monotonic()
        if is_reply:
            self._silent_since_s = math.inf

    def _is_silent_since(self, sent_s: float) -> None:
        self._silent_since_s = min(self._silent_since_s, max(sent_s, self._worked_at_s))

    async def failed(self, trouble: RequestTrouble, asking: Asking, sent_s: float) -> None:
        """Note a request of `asking`, sent at `sent_s` (`time.monotonic`), that got no reply. It
        counts as a try of the question unless the address is to blame, or asked to wait."""
        self._judge.fresh.discard(asking)
        asking.tried.add(self)
        asking.num_failures += 1
        asking.failing_since_s = min(asking.failing_since_s, sent_s)
        if trouble.retry_after_s:
            self.rests_until = time.monotonic() + trouble.retry_after_s
        self._is_silent_since(sent_s)
        if trouble.cause in FROM_A_WORKING_ADDRESS:
            self.works(is_reply=not trouble.asks_to_wait)
        elif not trouble.asks_to_wait:
            self.num_failures_in_row += 1
            if await self._is_to_blame(trouble.cause, asking):
                self.open(f"failed {self.num_failures_in_row} times in a row")
        if trouble.asks_to_wait:
            self._judge.stats.throttled += 1
        elif not self.is_open:
            asking.num_tries += 1

    @property
    def is_unproven(self) -> bool:
        """Whether it only fails and has never replied, so that the next failures may be those of
        the questions."""
        return self._is_failing and not self.is_open and self.dialect.proven is None

    @property
    def _is_failing(self) -> bool:
        return self.num_failures_in_row >= self._judge.config.breaker_failures

    async def _is_to_blame(self, cause: str, asking: Asking) -> bool:
        """Whether the breaker must open. It is asked for after enough failures in a row, and when
        the next failure of a question would be its last."""
        async with self._suspicion:
            is_last = asking.num_tries + 1 >= self._judge.config.max_attempts
            is_alone = is_last and self._worked_at_s < asking.failing_since_s
            if self.is_open or not (self._is_failing or is_alone):
                return False
            if cause in SILENCE:
                return True
            if self.dialect.proven is None:
                return self._is_failing and not self._judge.fresh
            return not await self.probe()

    async def probe(self) -> bool:
        """Send the last request that got a reply again; whether the address answers it."""
        request, sent_s = self.dialect.proven, time.monotonic()
        assert request is not None
        body = request.body(self.dialect.without(request))
        with suppress(RequestTrouble):
            if (await self.exchange("POST", "/chat/completions", body)).status < 500:
                self.works()
                return True
        self._is_silent_since(sent_s)
        return False

    def open(self, why: str) -> None:
        """Open the breaker, if it is closed. `why`: what the address did, for the log."""
        if self.is_open:
            return
        pause_s = self._judge.config.breaker_pause_s
        self._is_silent_since(time.monotonic())
        self._probe_at_s = time.monotonic() + pause_s
        self._judge.stats.breaker_openings += 1
        log.warning("%s %s: one probe every %.0f s until it answers", self._name, why, pause_s)

    async def exchange(
        self, method: str, path: str, body: bytes | None, timeout_s: float | None = None
    ) -> HttpAnswer:
        """Send one request; `timeout_s`: None for `judge.timeout_s`. Raises `RequestTrouble` if no
        answer comes."""
        self._judge.stats.requests += 1
        self.num_in_flight += 1
        timeout_s = self._judge.config.timeout_s if timeout_s is None else timeout_s
        try:
            return await self.http.request(method, path, body, timeout_s)
        finally:
            self.num_in_flight -= 1


class Addresses:
    """All addresses of one judge. Belongs to one event loop."""

    def __init__(
        self, config: JudgeConfig, urls: Sequence[str], check: Callable[[], None] = lambda: None
    ) -> None:
        self.config = config
        self._check = check
        self.stats = JudgeStats()
        self.fresh: set[Asking] = set()
        """Questions that are being asked and have not failed."""
        names = ["the judge"] if len(urls) == 1 else [f"the judge at {url}" for url in urls]
        self._all = [Address(self, url, name) for url, name in zip(urls, names, strict=True)]
        # Jitter must not draw from the run's random numbers: a retry would change the training.
        self._jitter = random.Random()
        self._next_line_s = 0.0

    def __iter__(self) -> Iterator[Address]:
        return iter(self._all)

    @property
    def down_s(self) -> float:
        """Seconds for which no address has replied; 0 if the last request to one got a reply."""
        return min(address.down_s for address in self._all)

    async def let_others_go_first(self, asking: Asking) -> None:
        """Wait while the judge only fails and has never replied: whether it is to blame shows once
        all questions that are being asked were sent."""
        ends_s = asking.failing_since_s + self.config.max_outage_s
        while asking not in self.fresh and self.fresh and time.monotonic() < ends_s:
            if not all(address.is_unproven for address in self._all):
                return
            await asyncio.sleep(POLL_S)

    async def admit(self, asking: Asking) -> Address:
        """Wait until the question may be sent; returns its address, preferably one that it has not
        tried.

        Raises OutageError once all have been down for `max_outage_s`, or the question has failed
        for that long. A new question may send one due probe even then: otherwise a judge that came
        back between two iterations would never be noticed.
        """
        may_probe = asking.num_sent == 0
        while True:
            self._check()
            up = [address for address in self._all if not address.is_open]
            waited_s = max(self.down_s, time.monotonic() - asking.failing_since_s)
            is_over = not up and waited_s >= self.config.max_outage_s
            others = [a for a in self._all if not up or a not in asking.tried]
            probed = next(
                (a for a in others if (may_probe or not is_over) and a.takes_probe()), None
            )
            if probed is not None:
                may_probe = False
                if probed.dialect.proven is None or await probed.probe():
                    return probed
            elif up:
                return min(up, key=lambda address: address.order_for(asking))
            elif is_over:
                raise OutageError(f"no answer for {waited_s:.0f} s")
            else:
                await asyncio.sleep(min(POLL_S, self.config.max_outage_s - waited_s))

    def pause_s(self, asking: Asking, trouble: RequestTrouble) -> float | None:
        """Pause before a question that got no reply is asked again, s; None: it is given up.

        It is given up after `max_attempts` tries, or `max_outage_s` after its first request without
        a reply was sent; if the judge only asks to wait, after its first such answer to any.
        """
        waited_s = time.monotonic() - asking.failing_since_s
        if trouble.asks_to_wait:
            waited_s = max(waited_s, self.down_s)
        left_s = self.config.max_outage_s - waited_s
        pause_s = backoff_s(self.config.backoff_s, asking.num_failures, self._jitter)
        pause_s = min(pause_s + (trouble.retry_after_s or 0.0), max(0.0, left_s))
        if any(not a.is_open and a not in asking.tried for a in self._all):
            pause_s = 0.0  # another address takes it
        else:
            asking.tried.clear()
        if trouble.asks_to_wait:
            self._log_wait(str(trouble), waited_s, pause_s, left_s)
        elif all(address.is_open for address in self._all):
            return 0.0  # `admit` waits
        is_given_up = left_s <= 0 or asking.num_tries >= self.config.max_attempts
        return None if is_given_up else pause_s

    def _log_wait(self, detail: str, waited_s: float, pause_s: float, left_s: float) -> None:
        now_s, config = time.monotonic(), self.config
        is_short = waited_s + pause_s < QUIET_S and left_s > 0
        if is_short or now_s < self._next_line_s:
            return
        self._next_line_s = now_s + LINE_EVERY_S
        log.warning(
            "the judge asks to wait (%s), for %.0f s so far: a question that waits longer than "
            "judge.max_outage_s=%g is given up, ungraded. Remedy: fewer requests at once "
            "(judge.max_concurrency=%d, on each rank), or a higher quota",
            *(detail, waited_s, config.max_outage_s, config.max_concurrency),
        )


# ---- client --------------------------------------------------------------------------------------
# Asks a vision-language judge over HTTP; a judge's failure is never a bad grade.

T = TypeVar("T")

LATE_S = 15.0
"""How long the health check still waits for other addresses once one has answered."""
HEALTH_TIMEOUT_S = 10.0
RETRY_TEMPERATURE_STEP = 0.3
SEEDS_PER_REPEAT = 1000
TOP_LOGPROBS = 20
"""The most that OpenAI, and vLLM without `--max-logprobs`, return."""
SHOWN_BODY_CHARS = 600
SHOWN_NAME_CHARS = 100
MAX_NAMES = 8
"""Limit of model names logged per address; some servers send a different name with each reply."""
REFUSED_SETUP = frozenset({401, 402, 403, 404, 405, 407})
"""A wrong key, path or model, or no money: like a redirect, these never concern one question."""
RETRIED_CLIENT_ERRORS = frozenset({408, 425, 429})


class JudgeError(RuntimeError):
    """The judge cannot be used as configured; a person must act."""


class JudgeRefused(JudgeError):  # noqa: N818 (reads as what happened)
    """The endpoint answers and refuses: wrong key, path, model or request."""


class JudgeUnreachableError(JudgeError):
    """No judge answers at the configured addresses."""


class JudgeEndedError(JudgeError):
    """The judge that the run started has ended."""


class JudgeClient:
    """A client of one judge. All coroutines must run in one event loop."""

    def __init__(
        self,
        config: JudgeConfig,
        api_base: str | Sequence[str],
        journal: Path | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`api_base`: from `resolve_api_bases`. `journal`: JSONL of replies, read now and extended.
        `check`: called before each request; raises if no address will answer again.

        Raises ValueError when the environment lacks the key that `config.api_key_env` names.
        """
        self.config = config
        # A ContextVar: a coroutine uses the journal that its thread had when submitting it.
        self._journal: ContextVar[ReplyJournal | None] = ContextVar("journal", default=None)
        self._open_journals: list[ReplyJournal] = []
        if journal:
            self.open_journal(journal)
        self._slots = asyncio.Semaphore(config.max_concurrency)
        # One new question at a time waits for a slot, so one that was sent before waits for few.
        self._line = asyncio.Lock()
        self._request_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        urls = [api_base] if isinstance(api_base, str) else api_base
        self._addresses = Addresses(config, urls, check)
        self._health_ends_s = math.inf

    def open_journal(self, path: Path) -> None:
        """Use another journal, e.g. one per iteration, for questions that this thread asks from now
        on. Its earlier questions keep the previous journal, which the next call closes."""
        if len(self._open_journals) > 1:
            self._open_journals.pop(0).close()
        self._open_journals.append(ReplyJournal(path))
        self._journal.set(self._open_journals[-1])

    def drop_unusable(self) -> None:
        """Drop the replies to questions that got no usable reply, so that a fixed judge is asked
        these again; all other replies are kept."""
        for journal in self._open_journals:
            journal.drop_unusable()

    def take_stats(self) -> JudgeStats:
        """Counts since the last call; a request under way counts when it ends."""
        stats, self._addresses.stats = self._addresses.stats, JudgeStats()
        return stats

    def dialects(self) -> dict[str, Dialect]:
        """URL -> the `Dialect` learnt for that address."""
        return {address.url: address.dialect for address in self._addresses}

    def adopt(self, dialects: Mapping[str, Dialect]) -> None:
        """Take over the dialects that another client has learnt for the same addresses."""
        for address in self._addresses:
            address.dialect = dialects.get(address.url, address.dialect)

    async def aclose(self) -> None:
        for address in self._addresses:
            await address.http.aclose()
        for journal in self._open_journals:
            journal.close()

    async def check_health(self, wait_s: float = 60.0) -> list[str]:
        """Check that the judge answers and serves the model; returns the addresses that do.

        A server that is still starting has `wait_s` (and one more request) to answer. One
        address is enough: the others get `LATE_S` more, then count as down, which is logged.
        Raises `JudgeUnreachableError` or `JudgeRefused`.
        """
        self._health_ends_s = math.inf
        waits = (self._unreachable(address, wait_s) for address in self._addresses)
        problems = await asyncio.gather(*waits)
        if all(problems):
            raise JudgeUnreachableError("\n".join(problems))
        for address, problem in zip(self._addresses, problems, strict=True):
            if problem:
                address.open(f"did not answer the health check ({problem})")
        return [address.url for address in self._addresses if not address.is_open]

    async def _unreachable(self, address: Address, wait_s: float) -> str:
        """Why `address` has not answered within `wait_s`; '' once it has. Raises `JudgeRefused` if
        it answers and does not serve `judge.model`."""
        started_s = time.monotonic()
        while True:
            try:
                response = await address.exchange("GET", "/models", None, HEALTH_TIMEOUT_S)
                if response.status != 200:
                    self._raise_for(response)
                served = served_models(response.body)
                if served is None:
                    raise JudgeRefused(
                        f"{address.url}/models answers, but not as an OpenAI-compatible endpoint: "
                        f"{_body_excerpt(response)}\nCheck judge.api_base."
                    )
                if self.config.model not in served:
                    raise JudgeRefused(
                        f"{address.url} does not serve judge.model={self.config.model!r}; it "
                        f"serves: {_names(served)}. Set judge.model to one of these."
                    )
                self._health_ends_s = min(self._health_ends_s, time.monotonic() + LATE_S)
                return ""
            except RequestTrouble as trouble:
                waited_s = time.monotonic() - started_s
                wait_s = min(wait_s, max(0.0, self._health_ends_s - started_s))
                if trouble.is_tls:
                    return f"{address.url} cannot be verified to be the judge ({trouble})"
                if waited_s >= wait_s:
                    return (
                        f"no judge at {address.url} after {waited_s:.0f} s ({trouble}): start it "
                        "(scripts/serve_judge.sh), or set judge.api_base to where it runs"
                    )
            await asyncio.sleep(min(1.0, wait_s - waited_s))

    async def ask(
        self, question: Question, parse: Callable[[str], T], repeat: int = 0
    ) -> Answer[T]:
        """As `rl.api.judge.Judge.ask`; raises `JudgeRefused`. A question has no slot while it backs
        off, so that those which the judge cannot answer do not hold up the others."""
        started = time.monotonic()
        asking = Asking(question, repeat)
        value, failure, pause_s = None, None, 0.0
        self._addresses.fresh.add(asking)
        try:
            while value is None and failure is None:
                await asyncio.sleep(pause_s)
                await self._addresses.let_others_go_first(asking)
                async with self._line if asking.num_sent == 0 else nullcontext():
                    await self._slots.acquire()
                try:
                    value, failure, pause_s = await self._ask(asking, parse)
                finally:
                    self._slots.release()
        finally:
            self._addresses.fresh.discard(asking)
        self._addresses.stats.of_ten += scores_of_ten(question.reply_schema, value)
        if failure:
            kind = "unreadable" if is_unreadable(failure) else "transport"
            self._addresses.stats.failed[kind] += 1
        seconds = time.monotonic() - started
        return Answer(value, tuple(asking.replies), failure, asking.num_sent, seconds)

    async def _ask(
        self, asking: Asking, parse: Callable[[str], T]
    ) -> tuple[T | None, str | None, float]:
        """Ask until the question ends or must pause: (parsed reply, None, 0), (None, why it is
        given up, 0), or (None, None, pause in s)."""
        config, question = self.config, asking.question
        if not asking.content:
            asking.content = [await encoded(p, config.image_side_px) for p in question.parts]
        while True:
            try:
                reply = await self._reply(asking)
                asking.num_tries += 1
                asking.replies.append(reply)
                refuse_part(reply)
                return parse(reply), None, 0.0
            except UnreadableReplyError as error:
                cause, failure, pause_s = "unreadable", f"unreadable: {error}", 0.0
            except OutageError as outage:
                return None, f"outage: {outage}", 0.0
            except RequestTrouble as trouble:
                cause, failure = trouble.cause, str(trouble)
                if cause == "refused":
                    return None, failure, 0.0
                wait_s = self._addresses.pause_s(asking, trouble)
                if wait_s is None and asking.num_tries < config.max_attempts:
                    return None, f"{failure} (for {config.max_outage_s:g} s)", 0.0
                pause_s = wait_s or 0.0
            is_final = bool(question.labels and asking.replies)
            if is_final or asking.num_tries >= config.max_attempts:
                if (journal := self._journal.get()) is not None:
                    journal.note_failed(asking.keys)
                return None, f"{failure} ({asking.num_tries} tries)", 0.0
            self._addresses.stats.retries[cause] += 1
            if cause == TOO_MANY_REQUESTS:  # it keeps its slot, so that fewer requests are sent
                await asyncio.sleep(pause_s)
            elif pause_s:
                return None, None, pause_s

    def _request(self, asking: Asking) -> Request:
        """The next request: each unreadable reply changes the seed and raises the temperature."""
        num_unreadable, labels = len(asking.replies), asking.question.labels
        # Some servers divide the logits by the temperature before they take log-probs.
        temperature = 1.0 if labels else asking.question.temperature
        if temperature is None:
            temperature = self.config.temperature
        parameters: dict[str, Any] = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": [CONTENT]}],
            "max_tokens": 1 if labels else self.config.max_tokens,
            "temperature": round(temperature + RETRY_TEMPERATURE_STEP * min(num_unreadable, 3), 3),
            # Some models' own defaults (top_p 0.001) would make temperature and seed do nothing.
            "top_p": 1.0,
            "seed": SEEDS_PER_REPEAT * asking.repeat + num_unreadable,
        }
        guided = self.config.guided_json
        if labels:  # without a schema: under one, all of the probability would be on the labels
            parameters |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        elif guided == "always" or (guided == "on_retry" and num_unreadable > 0):
            schema = {"name": "grade", "schema": asking.question.reply_schema}
            parameters["response_format"] = {"type": "json_schema", "json_schema": schema}
        return Request(parameters, asking.content)

    async def _reply(self, asking: Asking) -> str:
        """The judge's reply text, from the journal if it is there.

        Identical requests wait for each other: the second takes the reply to the first from the
        journal, as it would after a restart. (Without a journal every request is sent.)
        """
        request = self._request(asking)
        journal = self._journal.get()
        if journal is None:
            return await self._send(asking, request)
        async with self._request_locks.setdefault(request.key, asyncio.Lock()):
            reply = journal.get(request.key)
            if reply is not None:
                self._addresses.stats.reused += 1
            else:
                reply = journal.put(request.key, await self._send(asking, request))
        asking.keys.append(request.key)
        return reply

    async def _send(self, asking: Asking, request: Request) -> str:
        address = await self._addresses.admit(asking)
        labels, sent_s = asking.question.labels, time.monotonic()
        try:
            response = await self._post(address, asking, request)
            if not response.is_success:
                self._raise_for(response, address, asking)
            try:
                chat = read_chat(response.body, labels)
            except UnreadableReplyError as error:
                if isinstance(error, NoLogprobsError) and asking.shape not in address.answered:
                    raise JudgeRefused(
                        f"{address.url} answers, with {error}: {_body_excerpt(response)}\n"
                        f"{LOGPROBS_REMEDY}"
                    ) from None
                detail = f"HTTP {response.status} ({error}): {_body_excerpt(response)}"
                raise RequestTrouble("no_reply", detail) from None
        except RequestTrouble as trouble:
            await address.failed(trouble, asking, sent_s)
            raise
        address.works()
        address.answered.add(asking.shape)
        address.dialect.proven = request
        self._addresses.stats.prompt_tokens += chat.tokens[0]
        self._addresses.stats.completion_tokens += chat.tokens[1]
        await self._check_name(address, chat.model)
        return scrub(chat.reply)

    async def _post(self, address: Address, asking: Asking, request: Request) -> HttpAnswer:
        """The answer to `request`. If the address refuses a parameter, the request is sent again
        without it; once a reply comes, the dialect remembers which were left out.

        Raises `RequestTrouble` if no answer comes.
        """
        without: Set[str] = address.dialect.without(request)
        while True:
            asking.num_sent += 1
            started = time.monotonic()
            body = request.body(without)
            response = await address.exchange("POST", "/chat/completions", body)
            if response.status < 500:
                self._addresses.stats.latencies_s.append(time.monotonic() - started)
            sent = request.sent(without).keys()
            refused = refused_parameters(response.status, response.body, sent)
            if not refused:
                break
            self._addresses.stats.retries["parameter"] += 1
            without |= refused
        if learnt := address.dialect.learn(request, without, response.status):
            log.warning("the judge at %s %s from now on", address.url, in_words(learnt, without))
        return response

    def _raise_for(
        self, response: HttpAnswer, address: Address | None = None, asking: Asking | None = None
    ) -> NoReturn:
        """Raises `JudgeRefused` for a non-200 answer that a person must act on, `RequestTrouble`
        for others. `address`, `asking`: unset in a health check."""
        shape = asking and asking.shape
        status, body = response.status, _body_excerpt(response)
        trouble = RequestTrouble(f"http_{status}", body, response.retry_after_s)
        if status in RETRIED_CLIENT_ERRORS or status >= 500:
            raise trouble
        is_setup = status in REFUSED_SETUP or 300 <= status < 400
        if address and not is_setup and shape in address.answered:
            # The address has answered questions of this shape, so the set-up is right: this one is
            # too long, or moderated. (Taking one picture but refusing two is a set-up error.)
            raise RequestTrouble("refused", f"HTTP {status} {body}")
        others = (other for other in self._addresses if other is not address)
        if address and any(shape in other.answered for other in others):
            # Other addresses accept this shape: this one is misconfigured and counts as down.
            address.open(f"refuses (HTTP {status} {body})")
            raise trouble
        location = response.location and excerpt(response.location, SHOWN_HEADER_CHARS)
        remedy = remedy_for(status, location, self.config)
        if asking and asking.question.labels and "logprob" in body.lower():
            remedy = LOGPROBS_REMEDY
        raise JudgeRefused(
            f"the judge refused: {response.request} -> HTTP {status} {body}\n{remedy}"
        )

    async def _check_name(self, address: Address, model: str | None) -> None:
        """Logs, once per name, that a model other than `judge.model` has answered. Raises
        `JudgeRefused` if `judge.model` is no longer served."""
        configured, logged = self.config.model, address.dialect.model_names
        if model is None or model == configured:
            return
        self._addresses.stats.other_model += 1
        name = excerpt(model, SHOWN_NAME_CHARS)
        if name in logged or len(logged) >= MAX_NAMES:
            return
        logged.append(name)
        difference = f"{address.url} answers as {name!r}, asked for judge.model={configured!r}"
        served = None
        with suppress(RequestTrouble):
            response = await address.exchange("GET", "/models", None, HEALTH_TIMEOUT_S)
            served = served_models(response.body) if response.status == 200 else None
        if served is not None and configured not in served:
            raise JudgeRefused(
                f"{difference}, which it does not serve any more; it serves: {_names(served)}. "
                "Remedy: serve that model again, or start a new run with the other model, which "
                "grades differently."
            )
        log.warning(
            "%s: this is fine if both names mean the same model. A different model grades "
            "differently: set judge.model to the intended model, or turn the gateway's fallback "
            "off (judge/other_model_replies counts such replies)",
            difference,
        )


def _body_excerpt(response: HttpAnswer) -> str:
    """The beginning of the body, or why there is none; `shown` removes keys that it echoes."""
    if response.unusable and not response.body:
        return f"(a body {response.unusable})"
    return excerpt(response.body.decode("utf-8", "replace"), SHOWN_BODY_CHARS) or "(empty body)"


def _names(served: Sequence[str]) -> str:
    return ", ".join(excerpt(name, SHOWN_NAME_CHARS) for name in served[:10]) or "nothing"
