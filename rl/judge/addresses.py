"""The addresses of one judge. Each decides: ask, wait, probe, or give a question up."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rl.api.judge import Question
from rl.config.schema import JudgeConfig
from rl.judge.dialect import Dialect
from rl.judge.endpoint import auth_header
from rl.judge.http import HttpAnswer, JudgeHttp, RequestTrouble

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
