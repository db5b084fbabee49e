"""One judge at several addresses: the load, one that dies and comes back, and all of them down."""

from __future__ import annotations

import asyncio
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
from tiny_messages import names
from tiny_ranks import held_port

from rl.api.judge import Answer
from rl.config.schema import JudgeConfig
from rl.judge import client as client_module
from rl.judge.addresses import Addresses
from rl.judge.client import JudgeClient, JudgeRefused, JudgeUnreachableError

GONE = Fault(reset=True)


def all_graded(answers: Sequence[Answer[Any]]) -> bool:
    return all(answer.value == (8.0, 6.5) for answer in answers)


def test_the_fewest_in_flight_come_first() -> None:
    """One place takes 10 times as long: it gets a tenth or so."""
    with (
        FaultyJudge(after=Fault(stall_s=0.2)) as slow,
        FaultyJudge(after=Fault(stall_s=0.02)) as fast,
    ):
        answers, client = with_client([slow, fast], lambda c: ask_all(c, 40), max_concurrency=6)
    shares = len(slow.requests), len(fast.requests)
    print(f"\n| slow {shares[0]}, fast {shares[1]} |", end="")
    assert all_graded(answers) and sum(shares) == 40
    assert 3 <= shares[0] <= 13 and abs(slow.max_open - fast.max_open) <= 1
    assert client.take_stats().max_in_flight == 6, "over both together"


def test_one_that_dies_and_comes_back_costs_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def script(client: JudgeClient) -> list[Answer[Any]]:
        answers = await ask_all(client, 12)
        dying.after = GONE
        answers += await ask_all(client, 24, first=100)
        while_down = len(dying.requests)
        answers += await ask_all(client, 12, first=200)
        assert len(dying.requests) - while_down <= 2, "one probe a pause"
        dying.after = Fault()
        await asyncio.sleep(0.6)
        answers += await ask_all(client, 12, first=300)  # one of them is the probe
        back = len(dying.requests)
        answers += await ask_all(client, 12, first=400)
        assert len(dying.requests) - back > 2, "it has its share again"
        return answers

    with FaultyJudge() as dying, FaultyJudge() as other:
        answers, client = with_client(
            [dying, other], script, breaker_failures=4, breaker_pause_s=0.5, max_concurrency=8
        )
    assert all_graded(answers)
    assert all(answer.attempts <= 3 for answer in answers), "another place is asked at once"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, said
    assert names(said[0], f"{dying.api_base} ... 4 times ... probe")
    assert names(said[1], f"{dying.api_base} ... again")
    assert client.take_stats().breaker_openings == 1


def test_another_place_is_asked_without_a_pause() -> None:
    with FaultyJudge(after=Fault(500)) as broken, FaultyJudge() as other:
        answers, _ = with_client([broken, other], lambda c: ask_all(c, 4), backoff_s=60.0)
    assert all_graded(answers) and max(answer.seconds for answer in answers) < 10
    assert {answer.attempts for answer in answers} == {1, 2}


def test_one_that_asks_to_be_left_alone_is() -> None:
    async def script(client: JudgeClient) -> list[Answer[Any]]:
        return [*await ask_all(client, 2), *await ask_all(client, 20, first=100)]

    busy = Fault(429, headers={"Retry-After": "60"})
    with FaultyJudge(after=busy) as limited, FaultyJudge() as other:
        answers, client = with_client([limited, other], script, max_concurrency=2)
    assert all_graded(answers) and len(limited.requests) == 1
    assert client.take_stats().retries == {"http_429": 1}


def test_all_down_is_an_outage_that_is_waited_for() -> None:
    async def script(client: JudgeClient) -> list[Answer[Any]]:
        asking = asyncio.ensure_future(ask_all(client, 6))
        await asyncio.sleep(0.5)
        other.after = Fault()
        return await asking

    config = {"max_outage_s": 20.0, "max_attempts": 2, "breaker_failures": 3}
    with FaultyJudge(after=GONE) as one, FaultyJudge(after=GONE) as other:
        answers, client = with_client([one, other], script, **config)
    assert all_graded(answers) and client.take_stats().breaker_openings == 2


def test_one_that_refuses_what_another_takes_is_held_to_be_down(caplog) -> None:
    """It came back with another model: no reason to stop. One that all refuse is."""

    async def script(client: JudgeClient) -> list[Answer[Any]]:
        answers = await ask_all(client, 4)
        changed.after = Fault(404, body="no such model")
        answers += await ask_all(client, 8, first=100)
        other.after = Fault(404, body="no such model")
        with pytest.raises(JudgeRefused, match="no such model"):
            await asyncio.gather(
                *(client.ask(pair_question("a", "b"), read_pair) for _ in range(2))
            )
        return answers

    with FaultyJudge() as changed, FaultyJudge() as other:
        answers, _ = with_client([changed, other], script, breaker_pause_s=30.0)
    assert all_graded(answers)
    [said] = [record.getMessage() for record in caplog.records]
    assert names(said, f"{changed.api_base} ... HTTP 404 no such model ... 30 s")


def test_each_place_has_its_own_dialect() -> None:
    with PickyJudge("seed") as picky, FaultyJudge() as other:
        answers, client = with_client([picky, other], lambda c: ask_all(c, 12), max_concurrency=4)
    assert all_graded(answers)
    assert ["seed" in request for request in picky.requests].count(True) <= 4
    assert "seed" not in picky.requests[-1] and all("seed" in r for r in other.requests)
    assert client.dialects()[picky.api_base].names == {"seed"}


def test_a_dead_address_does_not_hold_up_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have a while after the first that answers, not the whole of `wait_s`."""
    monkeypatch.setattr(client_module, "LATE_S", 0.5)
    with held_port() as port, FaultyJudge() as judge:
        addresses = [f"http://127.0.0.1:{port}/v1", judge]
        started = time.monotonic()
        alive, _ = with_client(addresses, lambda client: client.check_health(60.0))
    assert alive == [judge.api_base] and 0.5 <= time.monotonic() - started < 10


def test_health_needs_one_of_them(caplog: pytest.LogCaptureFixture) -> None:
    async def script(client: JudgeClient) -> list[Answer[Any]]:
        await client.check_health(0.0)
        return await ask_all(client, 6)

    with held_port() as port, FaultyJudge() as judge:
        nowhere = f"http://127.0.0.1:{port}/v1"
        answers, _ = with_client([nowhere, judge], script, breaker_pause_s=30.0)
        assert all_graded(answers) and len(judge.requests) == 6
        [said] = [record.getMessage() for record in caplog.records]
        assert names(said, f"the judge at {nowhere} ... after 0 s")
        with pytest.raises(JudgeUnreachableError) as error:
            with_client([nowhere, f"{nowhere}/too"], lambda c: c.check_health(0.0))
        assert nowhere in str(error.value) and f"{nowhere}/too" in str(error.value)
        with pytest.raises(JudgeRefused, match=r"judge\.model='other'"):
            with_client([nowhere, judge], lambda c: c.check_health(0.0), model="other")


def test_the_breaker_opens_only_on_failures_in_a_row() -> None:
    [breaker] = Addresses(JudgeConfig(breaker_failures=3), ["http://127.0.0.1:1/v1"])
    for happens in "ffsff":
        breaker.failed() if happens == "f" else breaker.succeeded()
    assert not breaker.is_open
    breaker.failed()
    assert breaker.is_open and breaker.num_openings == 1
