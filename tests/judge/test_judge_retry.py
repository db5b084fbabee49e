"""The pauses between tries: back-off and Retry-After."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest

from rl.judge.client import backoff_s
from rl.judge.http import retry_after_s

NOON = datetime(2025, 11, 21, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(("num_failures", "most_s"), [(1, 2), (2, 4), (4, 16), (5, 30), (99, 30)])
def test_backoff_is_full_jitter_under_a_doubling_bound(num_failures: int, most_s: float) -> None:
    rng = random.Random(0)
    pauses = [backoff_s(2.0, num_failures, rng) for _ in range(500)]
    assert 0 <= min(pauses) < 0.05 * most_s and 0.95 * most_s < max(pauses) <= most_s


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("86400", 120.0),
        ("Fri, 21 Nov 2025 12:00:30 GMT", 30.0),
        ("Fri, 21 Nov 2025 13:00:30 +0100", 30.0),
        ("Fri, 21 Nov 2025 11:00:00 GMT", 0.0),
        ("Sat, 22 Nov 2025 12:00:00 GMT", 120.0),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("", None),
    ],
)
def test_retry_after(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header, NOON) == seconds
