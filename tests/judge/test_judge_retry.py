"""Back-off, Retry-After and the circuit breaker, without a network."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime

import pytest

from rl.config.schema import JudgeConfig
from rl.judge.bases import Bases, OutageError
from rl.judge.retry import backoff_s, retry_after_s

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
    [breaker] = bases_of(breaker_failures=3, breaker_pause_s=0.05)
    for _ in range(2):
        breaker.failed(is_probe=False)
    breaker.succeeded()
    for _ in range(2):
        breaker.failed(is_probe=False)
    assert not breaker.is_open
    breaker.failed(is_probe=False)
    assert breaker.is_open and breaker.num_openings == 1


def test_an_open_breaker_lets_one_probe_through_per_pause_and_all_once_it_succeeds() -> None:
    async def run() -> list[str]:
        events: list[str] = []
        bases = bases_of(breaker_pause_s=0.05, max_outage_s=9)
        [base] = bases
        base.failed(is_probe=False)

        async def worker() -> None:
            while True:
                _, is_probe = await bases.admit(())
                events.append("probe" if is_probe else "pass")
                await asyncio.sleep(0.02)
                is_down = events.count("probe") < 3
                if is_probe and is_down:
                    base.failed(is_probe)
                else:
                    bases.succeeded(base)
                base.end(is_probe)
                if not is_down:
                    return

        await asyncio.gather(*(worker() for _ in range(5)))
        assert not base.is_open and base.num_in_flight == 0
        return events

    assert asyncio.run(run()) == ["probe"] * 3 + ["pass"] * 4


def test_a_probe_that_dies_frees_its_place() -> None:
    async def run() -> bool:
        bases = bases_of(breaker_pause_s=0.01, max_outage_s=9)
        [base] = bases
        base.failed(is_probe=False)
        _, is_probe = await bases.admit(())
        base.end(is_probe)
        _, is_probe = await asyncio.wait_for(bases.admit(()), 1)
        return is_probe

    assert asyncio.run(run())


def test_waiting_ends_with_the_longest_outage_allowed() -> None:
    async def run() -> float:
        bases = bases_of(breaker_pause_s=10, max_outage_s=0.1)
        [base] = bases
        base.failed(is_probe=False)
        started = asyncio.get_running_loop().time()
        with pytest.raises(OutageError):
            await bases.admit(())
        return asyncio.get_running_loop().time() - started

    assert 0.09 < asyncio.run(run()) < 1
