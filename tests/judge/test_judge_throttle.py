"""A judge that asks to wait (HTTP 429): questions wait, the wait is logged and limited."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from tiny_faulty_judge import Fault, FaultyJudge, ask_all, pair_question, quick_config, with_client
from tiny_messages import holds

from rl.judge.client import Answer, Asking, JudgeClient
from rl.judge.http import TOO_MANY_REQUESTS, RequestTrouble

FULL = Fault(429, body="quota of 3 a minute is spent")


def ask(judge: FaultyJudge, num: int, **config: Any) -> tuple[list[Answer[Any]], JudgeClient]:
    return with_client(judge, lambda client: ask_all(client, num), **config)


def test_a_429_does_not_count_as_an_attempt(caplog: pytest.LogCaptureFixture) -> None:
    """Once the quota is back, every question that was refused is graded."""
    with FaultyJudge([FULL] * 20) as judge:
        answers, client = ask(judge, 6, max_attempts=2, max_outage_s=20.0)
    assert all(answer.value == (8.0, 6.5) for answer in answers)
    assert max(answer.attempts for answer in answers) > 2
    stats = client.take_stats()
    assert stats.throttled == stats.retries["http_429"] == 20 and stats.breaker_openings == 0
    assert caplog.text == "", "a short wait is not logged"


def test_an_endless_429_is_logged_and_ends_at_one_limit_for_all(caplog, monkeypatch) -> None:
    """The limit is the judge's, not each question's: queued questions do not wait again."""
    monkeypatch.setattr("rl.judge.client.QUIET_S", 0.3)
    started_s = time.monotonic()
    with FaultyJudge(after=FULL) as judge:
        answers, _ = ask(judge, 12, max_concurrency=4, max_outage_s=1.2)
        [warning] = caplog.messages
        judge.works()
        [again], _ = ask(judge, 1, max_outage_s=9.0)
    assert time.monotonic() - started_s < 12
    for answer in answers:
        assert answer.value is None
        assert answer.failure == "http_429: quota of 3 a minute is spent (for 1.2 s)"
    assert max(answer.seconds for answer in answers) < 1.2 + 1
    assert again.value, "the judge is used again once its quota is back"
    assert holds(warning, "http_429: quota of 3 a minute is spent ... judge.max_outage_s=1.2")
    assert holds(warning, "ungraded ... judge.max_concurrency=4")


@pytest.mark.parametrize("status", [408, 425, 500, 503, 529])
def test_any_status_with_a_retry_after_is_waited_for_within_the_limit(status, caplog) -> None:
    later = Fault(status, body="draining", headers={"Retry-After": "6"})
    with FaultyJudge(after=later) as judge:
        answers, _ = ask(judge, 4, max_concurrency=1, max_attempts=2, max_outage_s=0.4)
        assert len(judge.requests) <= 8
        judge.works()
        [again], _ = ask(judge, 1, max_attempts=1, max_outage_s=9.0)
    assert {answer.failure for answer in answers} == {f"http_{status}: draining (for 0.4 s)"}
    assert max(answer.seconds for answer in answers) < 3 and again.value
    assert holds(caplog.messages[0], f"asks to wait ... http_{status}: draining ... ungraded")


class Waiting:
    """A judge that only asks to wait, the questions that it is asked, and a clock (`now_s`)."""

    def __init__(self, max_outage_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr("rl.judge.client.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr("rl.judge.client.FIRST_PAUSE_S", 1e-9)
        self.judge = JudgeClient(quick_config(max_outage_s=max_outage_s), "http://127.0.0.1:1/v1")
        [self.address] = self.judge.addresses

    def pause_s(self, asking: Asking, retry_after_s: float) -> float | None:
        """The pause of a question that is asked now and told to wait; None: it is given up."""
        trouble = RequestTrouble(TOO_MANY_REQUESTS, "slow down", retry_after_s)
        asyncio.run(self.address.failed(trouble, asking, self.now_s))
        pause_s = self.judge._pause_s(asking, trouble)
        return None if asking.failure else round(pause_s, 3)


def test_a_long_wait_is_logged_once_a_minute_and_no_longer_than_the_limit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, asking = Waiting(100.0, monkeypatch), Asking(pair_question())
    assert waiting.pause_s(asking, 120.0) == 100.0
    assert holds(caplog.messages[0], "slow down ... for 0 s ... max_outage_s=100 ... ungraded")
    waiting.now_s += 30
    assert waiting.pause_s(asking, 120.0) == 70.0
    assert len(caplog.messages) == 1
    waiting.now_s += 70
    assert waiting.pause_s(asking, 120.0) is None
    assert waiting.pause_s(Asking(pair_question()), 1.0) is None, "the judge's limit, for all"


def test_a_question_is_given_up_at_the_limit_even_if_others_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting, asking = Waiting(600.0, monkeypatch), Asking(pair_question())
    for _ in range(60):
        assert waiting.pause_s(asking, 10.0) == 10.0
        waiting.now_s += 10
        waiting.address.works()
    assert waiting.pause_s(asking, 10.0) is None
    assert waiting.pause_s(Asking(pair_question()), 10.0) == 10.0, "a new question still waits"
