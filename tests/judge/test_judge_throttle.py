"""A judge that has too many requests (HTTP 429): questions wait, are told of, and are given up."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
from tiny_faulty_judge import Fault, FaultyJudge, pair_question, quick_config, read_pair
from tiny_messages import names

from rl.judge import throttle
from rl.judge.client import Answer, JudgeClient
from rl.judge.throttle import Throttle

FULL = Fault(429, body="quota of 3 a minute is spent")


async def ask_all(client: JudgeClient, num: int) -> list[Answer[Any]]:
    return list(
        await asyncio.gather(*(client.ask(pair_question(str(n)), read_pair) for n in range(num)))
    )


def asked(
    judge: FaultyJudge, num: int, then: Fault | None = None, num_before: int = 1, **config: Any
) -> tuple[list[Answer[Any]], JudgeClient]:
    """`then`: what the judge answers after its first `num_before` requests; None: as it did."""

    async def run() -> list[Answer[Any]]:
        asking = asyncio.ensure_future(ask_all(client, num))
        while then is not None and len(judge.requests) < num_before:
            await asyncio.sleep(0.02)
        judge.after = then or judge.after
        answers = await asking
        await client.aclose()
        return answers

    client = JudgeClient(quick_config(**config), judge.api_base)
    return asyncio.run(run()), client


def test_too_many_requests_cost_no_try(caplog: pytest.LogCaptureFixture) -> None:
    """The quota comes back: every question that was refused meanwhile is graded."""
    with FaultyJudge(after=FULL) as judge:
        answers, client = asked(judge, 6, Fault(), 20, max_attempts=2, max_outage_s=20.0)
    assert all(answer.value == (8.0, 6.5) for answer in answers)
    assert max(answer.attempts for answer in answers) > 2
    taken = client.take_stats()
    assert taken.throttled == taken.retries["http_429"] > 6 and taken.breaker_openings == 0
    assert caplog.text == "", "a moment is not worth a line"


def test_without_end_it_is_said_and_ends_at_the_limit_for_all(caplog, monkeypatch) -> None:
    """Those behind wait no second time: the limit is the judge's, not each question's."""
    monkeypatch.setattr(throttle, "QUIET_S", 0.3)
    started_s = time.monotonic()
    with FaultyJudge(after=FULL) as judge:
        answers, _ = asked(judge, 12, max_concurrency=4, max_outage_s=1.2)
        said = [record.getMessage() for record in caplog.records]
        again, _ = asked(judge, 1, Fault(), max_outage_s=9.0)
    assert time.monotonic() - started_s < 12
    for answer in answers:
        assert answer.value is None
        assert answer.failure == "http_429: quota of 3 a minute is spent (for 1.2 s)"
    assert [answer.attempts for answer in answers[4:]] == [1] * 8
    assert again[0].value, "a quota that came back is found"
    first, *_, last = said
    assert names(first, "http_429: quota of 3 a minute is spent ... open questions: 12 ...  s: 0;")
    assert names(first, "in 1 s (judge.max_outage_s=1.2) ... judge.max_concurrency=4")
    assert "go ungraded" in last
    assert sum("go ungraded" in line for line in said) == 1


@pytest.mark.parametrize("status", [408, 425, 500, 503, 529])
def test_any_answer_with_a_retry_after_is_waited_for_within_the_limit(status, caplog) -> None:
    later = Fault(status, body="draining", headers={"Retry-After": "6"})
    with FaultyJudge(after=later) as judge:
        answers, _ = asked(judge, 4, max_concurrency=1, max_attempts=2, max_outage_s=0.4)
        assert len(judge.requests) <= 8
        again, _ = asked(judge, 1, Fault(), max_attempts=1, max_outage_s=9.0)
    assert {answer.failure for answer in answers} == {f"http_{status}: draining (for 0.4 s)"}
    assert max(answer.seconds for answer in answers) < 3 and again[0].value
    assert names(caplog.messages[0], f"asks to wait ... http_{status}: draining ... go ungraded")


class Clock:
    """`time.monotonic` by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(throttle.time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_estimate_is_by_what_is_let_through(clock: Clock, caplog) -> None:
    limits = Throttle(quick_config(max_outage_s=600.0))
    turns = [limits.turn() for _ in range(30)]
    first, *others = [turn.__enter__() for turn in turns]
    assert limits.refused(first, 2.0, "slow down") == 2.0
    for turn in turns[20:]:
        clock.now_s += 1
        limits.answered()
        turn.__exit__(None, None, None)
    assert caplog.text == "", "10 s have not passed"
    assert limits.refused(others[0], 4.0, "slow down") == 4.0
    [line] = [record.getMessage() for record in caplog.records]
    assert names(line, "questions: 20 ... refused: 2 ... in 10 s: 10 ... in 4 s ... about 20 s")
    assert limits.refused(others[1], 4.0, "slow down") == 4.0
    assert len(caplog.records) == 1, "one line a minute"


def test_a_long_retry_after_is_said_at_once_and_waited_no_longer_than_the_limit(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Throttle(quick_config(max_outage_s=100.0))
    with limits.turn() as turn:
        assert limits.refused(turn, 120.0, "slow down") == 100.0
        assert caplog.messages[0].count("in 100 s") == 2
        clock.now_s += 100
        assert limits.refused(turn, 120.0, "slow down") is None


def test_a_question_is_given_up_though_others_are_let_through(clock: Clock) -> None:
    limits = Throttle(quick_config(max_outage_s=600.0))
    with limits.turn() as turn, limits.turn() as other:
        for _ in range(60):
            assert limits.refused(turn, 10.0, "slow down") == 10.0
            clock.now_s += 10
            limits.answered()
        assert limits.refused(turn, 10.0, "slow down") is None
        assert limits.refused(other, 10.0, "slow down") == 10.0, "the judge does answer"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_judge_lets_through_every_question_ends(clock: Clock, seed: int) -> None:
    rng = random.Random(seed)
    limits = Throttle(quick_config(max_outage_s=rng.choice([0.5, 30.0, 600.0])))
    share = rng.choice([0.0, 0.01, 0.3])
    for _ in range(50):
        with limits.turn() as turn:
            began_s = clock.now_s
            while rng.random() >= share:
                pause_s = limits.refused(turn, rng.choice([0.0, 0.2, 120.0]), "slow down")
                if pause_s is None:
                    break
                clock.now_s += pause_s + 0.1
            else:
                limits.answered()
            assert clock.now_s - began_s <= limits._config.max_outage_s + 0.2
