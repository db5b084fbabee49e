"""The places at which one judge answers: a question goes to the least busy one that is up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterator, Sequence

from rl.config.schema import JudgeConfig
from rl.judge.dialect import Dialect
from rl.judge.endpoint import auth_header
from rl.judge.http import JudgeHttp

log = logging.getLogger(__name__)


class OutageError(Exception):
    """Nobody has answered for longer than `max_outage_s`."""


class Base:
    """One place. Its circuit breaker opens after `breaker_failures` failures in a row; then one
    probe is sent per `breaker_pause_s`, and one that succeeds closes it."""

    def __init__(self, config: JudgeConfig, url: str, name: str) -> None:
        """`name`: in log lines."""
        self.url = url
        self.http = JudgeHttp(url, auth_header(config.api_key_env), config.max_concurrency)
        self.dialect = Dialect()
        self.learning = asyncio.Lock()
        """Held by the one question that finds out which parameters are not taken."""
        self.answered: set[tuple[bool, ...]] = set()
        """Shapes of question (True: a text, False: a picture) that got an answer."""
        self.num_in_flight = 0
        self.rests_until = 0.0
        """By its last Retry-After, `time.monotonic`."""
        self.is_open = False
        """It is down, by its breaker."""
        self.num_failures_in_row = 0
        self.num_openings = 0
        self._name = name
        self._failures_to_open = config.breaker_failures
        self._pause_s = config.breaker_pause_s
        self._is_probing = False
        self._next_probe_at = self._down_since = 0.0

    @property
    def down_s(self) -> float:
        """How long the present row of failures has lasted, s."""
        return time.monotonic() - self._down_since if self.num_failures_in_row else 0.0

    @property
    def next_probe_s(self) -> float:
        """Until an open one may be probed, s; 0: now."""
        wait_s = self._next_probe_at - time.monotonic()
        return max(0.0, self._pause_s if self._is_probing and wait_s <= 0 else wait_s)

    def begin(self) -> bool:
        """A request goes to it; returns whether that is a probe. `end` must follow."""
        self.num_in_flight += 1
        self._is_probing |= self.is_open
        return self.is_open

    def end(self, is_probe: bool) -> None:
        """That request has ended, however it ended."""
        self.num_in_flight -= 1
        self._is_probing &= not is_probe

    def succeeded(self) -> None:
        if self.is_open:
            log.warning("%s answers again after %.0f s", self._name, self.down_s)
        self.num_failures_in_row = 0
        self.is_open = False

    def failed(self, is_probe: bool) -> None:
        self._down_since = time.monotonic() - self.down_s
        self.num_failures_in_row += 1
        if is_probe:
            self._next_probe_at = time.monotonic() + self._pause_s
        elif self.num_failures_in_row >= self._failures_to_open:
            self.open(f"failed {self.num_failures_in_row} times in a row")

    def open(self, why: str) -> None:
        """Nothing if it is open already. `why`: what it did, in words."""
        if self.is_open:
            return
        self._down_since = time.monotonic() - self.down_s
        self.num_failures_in_row = max(1, self.num_failures_in_row)
        self.is_open = True
        self._next_probe_at = time.monotonic() + self._pause_s
        self.num_openings += 1
        every = f"one probe every {self._pause_s:.0f} s until it answers"
        log.warning("%s %s: %s", self._name, why, every)


class Bases:
    """All places of one judge. Belongs to one event loop."""

    def __init__(self, config: JudgeConfig, urls: Sequence[str]) -> None:
        names = ["the judge"] if len(urls) == 1 else [f"the judge at {url}" for url in urls]
        self._all = [Base(config, url, name) for url, name in zip(urls, names, strict=True)]
        self._max_outage_s = config.max_outage_s
        self._someone_answers = asyncio.Event()

    def __iter__(self) -> Iterator[Base]:
        return iter(self._all)

    @property
    def are_down(self) -> bool:
        return all(base.is_open for base in self._all)

    def has_other(self, tried: Collection[Base]) -> bool:
        """Whether another than those can be asked."""
        return any(not base.is_open and base not in tried for base in self._all)

    async def admit(self, tried: Collection[Base]) -> tuple[Base, bool]:
        """Wait until a request may go, and where to; one of `tried` only if there is no other.
        True: it is a probe. `Base.end` must follow.

        Raises OutageError once all have been down for `max_outage_s`. A probe that is due goes even
        then: otherwise a judge that came back between two iterations would never be noticed.
        """
        while True:
            up = [base for base in self._all if not base.is_open]
            for base in self._all:
                is_due = base.is_open and base.next_probe_s == 0
                if is_due and not (up and base in tried):
                    return base, base.begin()
            if up:
                now_s = time.monotonic()
                base = min(up, key=lambda b: (b in tried, b.rests_until > now_s, b.num_in_flight))
                return base, base.begin()
            down_s = min(base.down_s for base in self._all)
            left_s = self._max_outage_s - down_s
            if left_s <= 0:
                raise OutageError(f"no answer for {down_s:.0f} s")
            wait_s = min(base.next_probe_s for base in self._all)
            self._someone_answers.clear()
            try:
                async with asyncio.timeout(min(wait_s, left_s)):
                    await self._someone_answers.wait()
            except TimeoutError:
                continue

    def succeeded(self, base: Base) -> None:
        base.succeeded()
        self._someone_answers.set()

    async def aclose(self) -> None:
        for base in self._all:
            await base.http.aclose()
