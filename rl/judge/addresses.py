"""The addresses of one judge: selects the next one, and limits how long a question may wait."""

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
QUIET_S = 10.0
"""A wait is not logged while its length so far plus the next pause is shorter than this."""
LINE_EVERY_S = 60.0


class OutageError(Exception):
    """No address has answered for longer than `max_outage_s`."""


class Address:
    """One address, with a circuit breaker that opens after `breaker_failures` failures in a row.

    An open breaker lets one probe through per `breaker_pause_s`; a probe that succeeds closes it.
    """

    def __init__(self, config: JudgeConfig, url: str, name: str) -> None:
        """`name`: how log lines name the address."""
        self.url = url
        self.http = JudgeHttp(url, auth_header(config.api_key_env), config.max_concurrency)
        self.dialect = Dialect()
        self.answered: set[tuple[tuple[str, ...], tuple[bool, ...]]] = set()
        """Kinds of question that got an answer: (labels, for each part whether it is text)."""
        self.num_in_flight = 0
        self.rests_until = 0.0
        """End of the pause that its last Retry-After asked for, `time.monotonic`."""
        self.is_open = False
        self.num_failures_in_row = 0
        self.num_openings = 0
        self._name = name
        self._failures_to_open = config.breaker_failures
        self._pause_s = config.breaker_pause_s
        self._next_probe_at = 0.0
        self._answered_at = 0.0
        self._down_since: float | None = None

    @property
    def down_s(self) -> float:
        """Seconds since the first request of the current failures was sent, or since the last
        answer, if that came later; 0 if the last request did not fail."""
        return 0.0 if self._down_since is None else time.monotonic() - self._down_since

    def takes_probe(self) -> bool:
        """Whether the breaker is open and a probe is due; if so, the caller must send it."""
        is_due = self.is_open and time.monotonic() >= self._next_probe_at
        if is_due:
            self._next_probe_at = time.monotonic() + self._pause_s
        return is_due

    def succeeded(self) -> None:
        if self.is_open:
            log.warning("%s answers again after %.0f s", self._name, self.down_s)
        self.num_failures_in_row, self._down_since, self.is_open = 0, None, False
        self._answered_at = time.monotonic()

    def failed(self, sent_s: float) -> None:
        """`sent_s`: when the request that failed was sent, `time.monotonic`."""
        self._down_since = self._down_since or max(sent_s, self._answered_at)
        self.num_failures_in_row += 1
        if self.num_failures_in_row >= self._failures_to_open:
            self.open(f"failed {self.num_failures_in_row} times in a row")

    def open(self, why: str) -> None:
        """Open the breaker, if it is closed. `why`: what the address did, for the log."""
        if self.is_open:
            return
        self._down_since = self._down_since or time.monotonic()
        self.num_failures_in_row = max(1, self.num_failures_in_row)
        self.is_open = True
        self._next_probe_at = time.monotonic() + self._pause_s
        self.num_openings += 1
        schedule = f"one probe every {self._pause_s:.0f} s until it answers"
        log.warning("%s %s: %s", self._name, why, schedule)


class Addresses:
    """All addresses of one judge. Belongs to one event loop."""

    def __init__(self, config: JudgeConfig, urls: Sequence[str]) -> None:
        names = ["the judge"] if len(urls) == 1 else [f"the judge at {url}" for url in urls]
        self._all = [Address(config, url, name) for url, name in zip(urls, names, strict=True)]
        self._config = config
        self._only_refused_since_s: float | None = None
        """Time of the first answer that asked to wait after the last answer that did not."""
        self._next_line_s = 0.0
        self._has_given_up = False

    def __iter__(self) -> Iterator[Address]:
        return iter(self._all)

    @property
    def are_down(self) -> bool:
        return all(address.is_open for address in self._all)

    def has_other(self, tried: Collection[Address]) -> bool:
        """Whether an address that is up is not among `tried`."""
        return any(not address.is_open and address not in tried for address in self._all)

    async def admit(self, tried: Collection[Address], is_new: bool) -> Address:
        """Wait until a request may be sent; returns its address, preferably one not in `tried`.

        Raises OutageError once all have been down for `max_outage_s`. `is_new`: the question was
        not sent before. A new question may be the due probe even then: otherwise a judge that came
        back between two iterations would never be noticed. Another one may not: a probe that takes
        longer than `breaker_pause_s` makes the next one due, so it would be sent for ever.
        """
        while True:
            up = [address for address in self._all if not address.is_open]
            down_s = min(address.down_s for address in self._all)
            is_over = not up and down_s >= self._config.max_outage_s
            for address in self._all:
                may_probe = not (up and address in tried) and (is_new or not is_over)
                if may_probe and address.takes_probe():
                    return address
            if up:
                now_s = time.monotonic()
                return min(up, key=lambda a: (a in tried, a.rests_until > now_s, a.num_in_flight))
            if is_over:
                raise OutageError(f"no answer for {down_s:.0f} s")
            await asyncio.sleep(min(POLL_S, self._config.max_outage_s - down_s))

    def answered(self) -> None:
        """Note that the judge has answered a question."""
        self._only_refused_since_s, self._has_given_up = None, False

    def wait_s(self, refused_since_s: float, pause_s: float, detail: str) -> float | None:
        """Seconds, at most `pause_s`, that a question waits now because the judge asks for it (HTTP
        429, Retry-After); None: give the question up.

        A question waits at most `max_outage_s` after `refused_since_s`, its first such answer. It
        is given up at once if the judge gave only such answers for that long. `detail`: the answer,
        for the log.
        """
        now_s = time.monotonic()
        if self._only_refused_since_s is None:
            self._only_refused_since_s = now_s
        waited_s = now_s - min(refused_since_s, self._only_refused_since_s)
        left_s = self._config.max_outage_s - waited_s
        if left_s <= 0:
            if not self._has_given_up:
                self._has_given_up = True
                self._log(
                    detail, waited_s, "questions that waited this long are given up, ungraded"
                )
            return None
        pause_s = min(pause_s, left_s)
        if waited_s + pause_s >= QUIET_S and now_s >= self._next_line_s:
            self._next_line_s = now_s + LINE_EVERY_S
            self._log(detail, waited_s, f"next try in {pause_s:.0f} s, given up in {left_s:.0f} s")
        return pause_s

    def _log(self, detail: str, waited_s: float, what_next: str) -> None:
        log.warning(
            "the judge asks to wait (%s), for %.0f s so far: %s (judge.max_outage_s=%g). Remedy: "
            "fewer requests at once (judge.max_concurrency=%d, on each rank), or a higher quota",
            *(detail, waited_s, what_next),
            *(self._config.max_outage_s, self._config.max_concurrency),
        )
