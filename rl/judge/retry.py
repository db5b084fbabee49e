"""When to try again, and how long: jittered back-off, Retry-After, a circuit breaker, patience."""

from __future__ import annotations

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
    """Nobody has answered for longer than `max_outage_s`."""


class Breaker:
    """Says when a service that is down may be asked.

    Closed: always. `failures_to_open` failures in a row open it. Open: not for `pause_s`, then one
    probe at a time; a probe that succeeds closes it.
    """

    def __init__(self, failures_to_open: int, pause_s: float, name: str = "the judge") -> None:
        """`name`: in what is said of it."""
        self._failures_to_open = failures_to_open
        self._pause_s = pause_s
        self._name = name
        self._is_probing = False
        self._next_probe_at = 0.0
        self._down_since = 0.0
        self.is_open = False
        self.num_failures_in_row = 0
        self.num_openings = 0

    @property
    def down_s(self) -> float:
        """How long the present row of failures has lasted, s."""
        return time.monotonic() - self._down_since if self.num_failures_in_row else 0.0

    @property
    def next_probe_s(self) -> float:
        """Until an open one may be probed, s; 0: now."""
        wait_s = self._next_probe_at - time.monotonic()
        return max(0.0, self._pause_s if self._is_probing and wait_s <= 0 else wait_s)

    def begin_probe(self) -> None:
        """`end_probe` must follow."""
        self._is_probing = True

    def end_probe(self) -> None:
        self._is_probing = False

    def succeeded(self) -> None:
        if self.is_open:
            log.warning("%s answers again after %.0f s", self._name, self.down_s)
        self.num_failures_in_row = 0
        self.is_open = False

    def failed(self, is_probe: bool) -> None:
        if self.num_failures_in_row == 0:
            self._down_since = time.monotonic()
        self.num_failures_in_row += 1
        if is_probe:
            self._next_probe_at = time.monotonic() + self._pause_s
        elif not self.is_open and self.num_failures_in_row >= self._failures_to_open:
            self.open(f"failed {self.num_failures_in_row} times in a row")

    def open(self, why: str) -> None:
        """`why`: what it did, in words."""
        if self.num_failures_in_row == 0:
            self._down_since = time.monotonic()
            self.num_failures_in_row = 1
        self.is_open = True
        self._next_probe_at = time.monotonic() + self._pause_s
        self.num_openings += 1
        log.warning(
            "%s %s: one probe every %.0f s until it answers", self._name, why, self._pause_s
        )
