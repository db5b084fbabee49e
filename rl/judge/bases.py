"""The addresses at which one judge answers: a question goes to the least busy one that is up."""

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

POLL_S = 0.2


class OutageError(Exception):
    """No address has answered for longer than `max_outage_s`."""


class Base:
    """One address, with a circuit breaker that opens after `breaker_failures` failures in a row.

    An open one gets one probe per `breaker_pause_s`; one that succeeds closes it.
    """

    def __init__(self, config: JudgeConfig, url: str, name: str) -> None:
        """`name`: in log lines."""
        self.url = url
        self.http = JudgeHttp(url, auth_header(config.api_key_env), config.max_concurrency)
        self.dialect = Dialect()
        self.answered: set[tuple[bool, ...]] = set()
        """Shapes of question (True: a text, False: a picture) that got an answer."""
        self.num_in_flight = 0
        self.rests_until = 0.0
        """Until when its last Retry-After asks to be left alone, `time.monotonic`."""
        self.is_open = False
        self.num_failures_in_row = 0
        self.num_openings = 0
        self._name = name
        self._failures_to_open = config.breaker_failures
        self._pause_s = config.breaker_pause_s
        self._next_probe_at = self._down_since = 0.0

    @property
    def down_s(self) -> float:
        """How long the present row of failures has lasted, s."""
        return time.monotonic() - self._down_since if self.num_failures_in_row else 0.0

    def takes_probe(self) -> bool:
        """Whether it is open and a probe is due, which then goes to it."""
        is_due = self.is_open and time.monotonic() >= self._next_probe_at
        if is_due:
            self._next_probe_at = time.monotonic() + self._pause_s
        return is_due

    def succeeded(self) -> None:
        if self.is_open:
            log.warning("%s answers again after %.0f s", self._name, self.down_s)
        self.num_failures_in_row = 0
        self.is_open = False

    def failed(self) -> None:
        self._down_since = time.monotonic() - self.down_s
        self.num_failures_in_row += 1
        if self.num_failures_in_row >= self._failures_to_open:
            self.open(f"failed {self.num_failures_in_row} times in a row")

    def open(self, why: str) -> None:
        """Open the breaker, if it is not. `why`: what the base did, for the log."""
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
    """All addresses of one judge. Belongs to one event loop."""

    def __init__(self, config: JudgeConfig, urls: Sequence[str]) -> None:
        names = ["the judge"] if len(urls) == 1 else [f"the judge at {url}" for url in urls]
        self._all = [Base(config, url, name) for url, name in zip(urls, names, strict=True)]
        self._max_outage_s = config.max_outage_s

    def __iter__(self) -> Iterator[Base]:
        return iter(self._all)

    @property
    def are_down(self) -> bool:
        return all(base.is_open for base in self._all)

    def has_other(self, tried: Collection[Base]) -> bool:
        """Whether another than those can be asked."""
        return any(not base.is_open and base not in tried for base in self._all)

    async def admit(self, tried: Collection[Base]) -> Base:
        """Wait until a request may go, and where to; one of `tried` only if there is no other.

        Raises OutageError once all have been down for `max_outage_s`. A probe that is due goes even
        then: otherwise a judge that came back between two iterations would never be noticed.
        """
        while True:
            up = [base for base in self._all if not base.is_open]
            for base in self._all:
                if not (up and base in tried) and base.takes_probe():
                    return base
            if up:
                now_s = time.monotonic()
                return min(up, key=lambda b: (b in tried, b.rests_until > now_s, b.num_in_flight))
            down_s = min(base.down_s for base in self._all)
            if down_s >= self._max_outage_s:
                raise OutageError(f"no answer for {down_s:.0f} s")
            await asyncio.sleep(min(POLL_S, self._max_outage_s - down_s))
