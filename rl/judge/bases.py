"""The places at which one judge answers: a question goes to the least busy one that is up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Sequence

from rl.config.schema import JudgeConfig
from rl.judge.dialect import Dialect
from rl.judge.endpoint import auth_header
from rl.judge.http import JudgeHttp
from rl.judge.retry import Breaker, OutageError


class Base:
    """One place. Belongs to one event loop."""

    def __init__(self, config: JudgeConfig, url: str, name: str) -> None:
        self.url = url
        self.http = JudgeHttp(url, auth_header(config.api_key_env), config.max_concurrency)
        self.breaker = Breaker(config.breaker_failures, config.breaker_pause_s, name)
        self.dialect = Dialect()
        self.learning = asyncio.Lock()
        """Held by the one question that finds out what is not taken."""
        self.answered: set[tuple[bool, ...]] = set()
        """Shapes of question (True: a text, False: a picture) that got an answer."""
        self.num_in_flight = 0
        self.rests_until = 0.0
        """It has asked to be left alone (Retry-After) until then, `time.monotonic`."""


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
        """Whether every breaker is open."""
        return all(base.breaker.is_open for base in self._all)

    def has_other(self, tried: Collection[Base]) -> bool:
        """Whether another than those can be asked."""
        return any(not base.breaker.is_open and base not in tried for base in self._all)

    async def admit(self, tried: Collection[Base]) -> tuple[Base, bool]:
        """Wait until a request may go, and where to; one of `tried` only if there is no other.
        True: it is a probe. `release` must follow.

        Raises OutageError once all have been down for `max_outage_s`. A probe that is due goes even
        then: otherwise a judge that came back between two iterations would never be noticed.
        """
        while True:
            up = [base for base in self._all if not base.breaker.is_open]
            for base in self._all:
                is_due = base.breaker.is_open and base.breaker.next_probe_s == 0
                if is_due and not (up and base in tried):
                    base.breaker.begin_probe()
                    base.num_in_flight += 1
                    return base, True
            if up:
                now_s = time.monotonic()
                base = min(up, key=lambda b: (b in tried, b.rests_until > now_s, b.num_in_flight))
                base.num_in_flight += 1
                return base, False
            down_s = min(base.breaker.down_s for base in self._all)
            left_s = self._max_outage_s - down_s
            if left_s <= 0:
                raise OutageError(f"no answer for {down_s:.0f} s")
            wait_s = min(base.breaker.next_probe_s for base in self._all)
            self._someone_answers.clear()
            try:
                async with asyncio.timeout(min(wait_s, left_s)):
                    await self._someone_answers.wait()
            except TimeoutError:
                continue

    def release(self, base: Base, is_probe: bool) -> None:
        """The admitted request has ended, however it ended."""
        base.num_in_flight -= 1
        if is_probe:
            base.breaker.end_probe()

    def succeeded(self, base: Base) -> None:
        base.breaker.succeeded()
        self._someone_answers.set()

    async def aclose(self) -> None:
        for base in self._all:
            await base.http.aclose()
