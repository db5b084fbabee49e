"""When to try again: jittered back-off, Retry-After, and a circuit breaker."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

BACKOFF_CAP_S = 30.0
RETRY_AFTER_CAP_S = 120.0
RETRY_AFTER_CHARS = 64
"""Twice the longest HTTP date."""

_SECONDS = re.compile(r"-?[0-9]+(\.[0-9]+)?")

log = logging.getLogger(__name__)


def backoff_s(first_s: float, num_failures: int, rng: random.Random) -> float:
    """Pause after the n-th failure (n >= 1), s: uniform(0, min(30, first_s * 2^(n-1))).

    "Full jitter" (Brooker 2015, 'Exponential Backoff And Jitter'): clients that failed together do
    not come back together.
    """
    return rng.uniform(0.0, min(BACKOFF_CAP_S, first_s * 2.0 ** min(num_failures - 1, 16)))


def retry_after_s(header: str | None, now: datetime | None = None) -> float | None:
    """A Retry-After header (RFC 9110 10.2.3: seconds or an HTTP date) as seconds, 0..120.

    None when there is none or it cannot be read.
    """
    if header is None or len(header) > RETRY_AFTER_CHARS:
        return None
    # float() alone would also take 1e400, 'infinity', 1_0 and other scripts' digits.
    if _SECONDS.fullmatch(header.strip()):
        seconds = float(header)
    else:
        try:
            until = parsedate_to_datetime(header)
            if until.tzinfo is None:
                until = until.replace(tzinfo=UTC)
            seconds = (until - (now or datetime.now(UTC))).total_seconds()
        except (ValueError, TypeError, LookupError, OverflowError):
            # A header that is nearly a date fails inside the parser, in one of these ways.
            return None
    return min(max(seconds, 0.0), RETRY_AFTER_CAP_S)


class OutageError(Exception):
    """The breaker has been open for longer than `max_outage_s`."""


class Breaker:
    """Holds requests back while a service is down. Belongs to one event loop.

    Closed: all pass. `failures_to_open` failures in a row open it. Open: nobody passes for
    `pause_s`, then one probe at a time; a probe that succeeds closes it. Those who wait give up
    (`OutageError`) once the service has been down for `max_outage_s`.
    """

    def __init__(self, failures_to_open: int, pause_s: float, max_outage_s: float) -> None:
        self._failures_to_open = failures_to_open
        self._pause_s = pause_s
        self._max_outage_s = max_outage_s
        self._closed = asyncio.Event()
        self._closed.set()
        self._is_probing = False
        self._next_probe_at = 0.0
        self._down_since = 0.0
        self.num_failures_in_row = 0
        self.num_openings = 0

    @property
    def is_open(self) -> bool:
        return not self._closed.is_set()

    @property
    def down_s(self) -> float:
        """How long the present row of failures has lasted, s."""
        return time.monotonic() - self._down_since if self.num_failures_in_row else 0.0

    async def admit(self) -> bool:
        """Wait until a request may go. True: it is the probe, and `release` must follow.

        A probe that is due goes even past `max_outage_s`: otherwise a service that came back
        between two iterations would never be noticed.
        """
        while self.is_open:
            wait_s = self._next_probe_at - time.monotonic()
            if wait_s <= 0 and not self._is_probing:
                self._is_probing = True
                return True
            left_s = self._max_outage_s - self.down_s
            if left_s <= 0:
                raise OutageError(f"no answer for {self.down_s:.0f} s")
            wait_s = wait_s if wait_s > 0 else self._pause_s
            try:
                async with asyncio.timeout(min(wait_s, left_s)):
                    await self._closed.wait()
            except TimeoutError:
                continue
        return False

    def release(self, is_probe: bool) -> None:
        """The admitted request has ended, however it ended."""
        if is_probe:
            self._is_probing = False

    def succeeded(self) -> None:
        if self.is_open:
            log.warning("the judge answers again after %.0f s", self.down_s)
        self.num_failures_in_row = 0
        self._closed.set()

    def failed(self, is_probe: bool) -> None:
        if self.num_failures_in_row == 0:
            self._down_since = time.monotonic()
        self.num_failures_in_row += 1
        if is_probe:
            self._next_probe_at = time.monotonic() + self._pause_s
        elif not self.is_open and self.num_failures_in_row >= self._failures_to_open:
            self.open()

    def open(self) -> None:
        self._closed.clear()
        self._next_probe_at = time.monotonic() + self._pause_s
        self.num_openings += 1
        log.warning(
            "the judge failed %d times in a row: one probe every %.0f s until it answers",
            self.num_failures_in_row,
            self._pause_s,
        )
