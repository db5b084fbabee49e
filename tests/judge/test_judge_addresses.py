"""One judge at several addresses: load balancing, failure and recovery, outages of all."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from tiny_faulty_judge import (
    Fault,
    FaultyJudge,
    PickyJudge,
    ask_all,
    pair_question,
    read_pair,
    with_client,
)
from tiny_messages import holds, raising
from tiny_ranks import held_port

from rl.api.judge import Answer
from rl.judge import client as client_module
from rl.judge.client import JudgeClient, JudgeRefused, JudgeUnreachableError

GONE = Fault(reset=True)


def all_graded(answers: Sequence[Answer[Any]]) -> bool:
    return all(answer.value == (8.0, 6.5) for answer in answers)


def test_a_question_goes_to_the_address_with_the_fewest_in_flight() -> None:
    """One address takes 10 times as long, so it gets about a tenth of the questions."""
    with (
        FaultyJudge(after=Fault(stall_s=0.2)) as slow,
        FaultyJudge(after=Fault(stall_s=0.02)) as fast,
    ):
        answers, _ = with_client([slow, fast], lambda c: ask_all(c, 40), max_concurrency=6)
    assert all_graded(answers) and len(slow.requests) + len(fast.requests) == 40
    assert 3 <= len(slow.requests) <= 13 and abs(slow.max_open - fast.max_open) <= 1
    assert slow.max_open + fast.max_open <= 6 + 2, "the limit is for both together"


def test_an_address_that_fails_and_recovers_loses_no_answer(caplog, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "SUSPECT_FAILURES", 4)

    async def script(client: JudgeClient) -> list[Answer[Any]]:
        answers: list[Answer[Any]] = []
        num_asked = []
        for response, pause_s in ((Fault(), 0), (GONE, 0), (GONE, 0), (Fault(), 0.6), (Fault(), 0)):
            dying.after = response
            await asyncio.sleep(pause_s)
            num_before = len(dying.requests)
            answers += await ask_all(client, 24, first=len(answers))
            num_asked.append(len(dying.requests) - num_before)
        assert num_asked[2] <= 2, "one check per pause"
        assert num_asked[4] > 2, "it gets its share again"
        return answers

    with FaultyJudge() as dying, FaultyJudge() as other:
        answers, client = with_client([dying, other], script, max_outage_s=20.0, max_concurrency=8)
    assert all_graded(answers)
    assert all(answer.attempts <= 3 for answer in answers), "another address is asked at once"
    lost, back = caplog.messages
    assert holds(lost, f"{dying.api_base} ... times in a row ... probe")
    assert holds(back, f"{dying.api_base} ... again")
    assert client.take_stats().breaker_openings == 1


def test_a_failed_question_goes_to_another_address_without_a_pause(monkeypatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 7200.0)
    with FaultyJudge(after=Fault(500)) as broken, FaultyJudge() as other:
        answers, _ = with_client([broken, other], lambda c: ask_all(c, 4))
    assert all_graded(answers) and max(answer.seconds for answer in answers) < 10
    assert {answer.attempts for answer in answers} == {1, 2}


def test_an_address_with_a_retry_after_gets_no_more_questions() -> None:
    async def script(client: JudgeClient) -> list[Answer[Any]]:
        return [*await ask_all(client, 2), *await ask_all(client, 20, first=100)]

    busy = Fault(429, headers={"Retry-After": "60"})
    with FaultyJudge(after=busy) as limited, FaultyJudge() as other:
        answers, client = with_client([limited, other], script, max_concurrency=2)
    assert all_graded(answers) and len(limited.requests) == 1
    assert client.take_stats().retries == {"http_429": 1}


def test_an_outage_of_all_addresses_is_waited_for() -> None:
    with FaultyJudge(after=GONE) as one, FaultyJudge(after=GONE) as other:
        one.models = other.models = GONE
        threading.Timer(0.5, other.works).start()
        config = {"max_outage_s": 20.0, "max_attempts": 2}
        answers, client = with_client([one, other], lambda c: ask_all(c, 6), **config)
    assert all_graded(answers) and client.take_stats().breaker_openings == 2


def test_an_address_that_refuses_what_another_accepts_counts_as_down(caplog) -> None:
    """One address serves another model: the run goes on. If all refuse, the run stops."""

    async def script(client: JudgeClient) -> list[Answer[Any]]:
        answers = await ask_all(client, 4)
        changed.after = Fault(404, body="no such model")
        answers += await ask_all(client, 8, first=100)
        other.after = Fault(404, body="no such model")
        with pytest.raises(JudgeRefused, match="no such model"):
            await asyncio.gather(*(client.ask(pair_question("a", "b"), read_pair) for _ in "ab"))
        return answers

    with FaultyJudge() as changed, FaultyJudge() as other:
        answers, _ = with_client([changed, other], script, max_outage_s=600.0)
    assert all_graded(answers)
    [warning] = caplog.messages
    assert holds(warning, f"{changed.api_base} ... HTTP 404 no such model ... 15 s")


def test_each_address_has_its_own_dialect() -> None:
    with PickyJudge("seed") as picky, FaultyJudge() as other:
        answers, client = with_client([picky, other], lambda c: ask_all(c, 12), max_concurrency=4)
    assert all_graded(answers)
    assert ["seed" in request for request in picky.requests].count(True) <= 4
    assert "seed" not in picky.requests[-1] and all("seed" in r for r in other.requests)
    assert client.addresses[0].dialect.names == {"seed"}


def test_the_health_check_needs_one_working_address(caplog: pytest.LogCaptureFixture) -> None:
    async def script(client: JudgeClient) -> list[Answer[Any]]:
        await client.check_health(0.0)
        return await ask_all(client, 6)

    with held_port() as port, FaultyJudge() as judge:
        dead_address = f"http://127.0.0.1:{port}/v1"
        answers, _ = with_client([dead_address, judge], script, max_outage_s=600.0)
        assert all_graded(answers) and len(judge.requests) == 6
        [warning] = caplog.messages
        assert holds(warning, f"the judge at {dead_address} ... after 0 s")
        started_s = time.monotonic()
        parts = f"{dead_address}  ... {dead_address}/too ... judge.api_base"
        with raising(JudgeUnreachableError, parts):
            with_client([dead_address, f"{dead_address}/too"], lambda c: c.check_health(0.5))
        assert 0.4 < time.monotonic() - started_s < 4
        with pytest.raises(JudgeRefused, match=r"judge\.model='other'"):
            with_client([dead_address, judge], lambda c: c.check_health(0.0), model="other")


def test_an_address_is_checked_only_after_failures_in_a_row(monkeypatch) -> None:
    """Before it has answered a question, it is asked for its models."""
    monkeypatch.setattr(client_module, "SUSPECT_FAILURES", 3)
    for faults, num_checks in ([GONE, GONE, Fault()] * 2, 0), ([GONE] * 3, 1), ([GONE] * 6, 2):
        with FaultyJudge(faults) as judge:
            answers, client = with_client(judge, lambda c: ask_all(c, 2), max_concurrency=1)
            stats = client.take_stats()
        assert all_graded(answers) and stats.breaker_openings == 0
        assert stats.requests - len(judge.requests) == num_checks
