"""How long to wait before the next try: jittered back-off, and the Retry-After header."""

from __future__ import annotations

import random
import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

BACKOFF_CAP_S = 30.0
RETRY_AFTER_CAP_S = 120.0

_SECONDS = re.compile(r"-?[0-9]+(\.[0-9]+)?")


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
    if header is None:
        return None
    # float() alone would also take 1e400, 'infinity', 1_0 and other scripts' digits.
    if _SECONDS.fullmatch(header.strip()):
        seconds = float(header)
    else:
        try:
            until = parsedate_to_datetime(header)
            until = until if until.tzinfo else until.replace(tzinfo=UTC)
            seconds = (until - (now or datetime.now(UTC))).total_seconds()
        except (ValueError, TypeError, LookupError, OverflowError):
            return None
    return min(max(seconds, 0.0), RETRY_AFTER_CAP_S)
