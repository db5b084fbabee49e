"""Back-off, Retry-After and the circuit breaker, without a network."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime

import pytest

from rl.config.schema import JudgeConfig
from rl.judge.bases import Bases, OutageError
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


def bases_of(**config: float) -> Bases:
    return Bases(JudgeConfig(**{"breaker_failures": 1, **config}), ["http://127.0.0.1:1/v1"])


def test_the_breaker_opens_only_on_failures_in_a_row() -> None:
    [breaker] = bases_of(breaker_failures=3)
    breaker.failed()
    breaker.failed()
    breaker.succeeded()
    breaker.failed()
    breaker.failed()
    assert not breaker.is_open
    breaker.failed()
    assert breaker.is_open and breaker.num_openings == 1


def test_an_open_breaker_lets_one_probe_through_per_pause_and_all_once_it_succeeds() -> None:
    async def run() -> list[str]:
        events: list[str] = []
        bases = bases_of(breaker_pause_s=0.3, max_outage_s=9)
        [base] = bases
        base.failed()

        async def worker() -> None:
            while True:
                await bases.admit(())
                events.append("probe" if base.is_open else "pass")
                await asyncio.sleep(0.02)
                if events.count("probe") == 3:
                    base.succeeded()
                    return
                base.failed()

        await asyncio.gather(*(worker() for _ in range(5)))
        return events

    assert asyncio.run(run()) == ["probe"] * 3 + ["pass"] * 4


def test_waiting_ends_with_the_longest_outage_allowed() -> None:
    async def run() -> float:
        bases = bases_of(breaker_pause_s=10, max_outage_s=0.1)
        [base] = bases
        base.failed()
        started = asyncio.get_running_loop().time()
        with pytest.raises(OutageError):
            await bases.admit(())
        return asyncio.get_running_loop().time() - started

    assert 0.09 < asyncio.run(run()) < 1
