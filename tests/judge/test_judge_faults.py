"""How the judge client handles each fault of a real HTTP server. `-s` prints the table."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_faulty_judge import (
    GOOD,
    Fault,
    FaultyJudge,
    answers_of,
    ask_all,
    pair_question,
    with_client,
)

from rl.judge.client import Answer, JudgeClient, JudgeRefused, JudgeStats, backoff_s


@dataclass(frozen=True)
class Case:
    """One fault and its expected outcome."""

    faults: list[Fault]
    sent: int
    """Expected number of requests."""
    cause: str | None = None
    """The expected reason of each retry."""
    failure: str | None = None
    """First word of the answer's failure; None: the answer has a value."""
    at_least_s: float = 0.0
    at_most_s: float = 15.0
    config: dict[str, Any] = field(default_factory=dict)


def _in_two_seconds() -> str:
    """HTTP dates have whole seconds, so this is 1 to 2 s from now."""
    return format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)


CASES = {
    "none": Case([], sent=1),
    "429 with Retry-After: 0.5": Case(
        [Fault(429, headers={"Retry-After": "0.5"})], 2, "http_429", at_least_s=0.5
    ),
    "429 with Retry-After: a date": Case(
        [Fault(429, headers={"Retry-After": _in_two_seconds})], 2, "http_429", at_least_s=0.9
    ),
    "429 twice, no Retry-After": Case([Fault(429)] * 2, 3, "http_429"),
    "408": Case([Fault(408)], 2, "http_408"),
    "500 three times": Case([Fault(500, body="out of memory")] * 3, 4, "http_500"),
    "500 for ever": Case([Fault(500)] * 9, 6, "http_500", failure="http_500"),
    "503 with Retry-After": Case(
        [Fault(503, headers={"Retry-After": "0.3"})], 2, "http_503", at_least_s=0.3
    ),
    "connection reset": Case([Fault(reset=True)] * 2, 3, "transport"),
    "reply cut in the middle": Case([Fault(cut=True)], 2, "transport"),
    "stall beyond the time-out": Case(
        [Fault(stall_s=4.0)], 2, "timeout", at_least_s=1.5, config={"timeout_s": 1.5}
    ),
    "reply that trickles past the time-out": Case(
        [Fault(trickle_s=0.05)], 2, "timeout", at_least_s=1.5, config={"timeout_s": 1.5}
    ),
    "prose": Case([Fault(reply="A lovely edit, 9 of 10.")], 2, "unreadable"),
    "unreadable for ever": Case(
        [Fault(reply="no")] * 9, 6, "unreadable", failure="unreadable"
    ),
}  # fmt: skip


def ask(judge: FaultyJudge, case: Case) -> tuple[Answer[Any], JudgeStats]:
    client = judge.client(**case.config)
    [answer] = answers_of(client, [pair_question()])
    return answer, client.take_stats()


@pytest.mark.parametrize("name", CASES)
def test_each_fault_has_its_expected_retries_and_outcome(name: str) -> None:
    case = CASES[name]
    with FaultyJudge(case.faults) as judge:
        answer, stats = ask(judge, case)
    outcome = answer.failure or f"value {answer.value}"
    print(f"\n| {name} | {answer.attempts} | {answer.seconds:.2f} | {outcome} |", end="")
    assert answer.attempts == len(judge.requests) == case.sent
    # Before a question is given up for its failures, the judge is asked whether it lives.
    assert stats.requests == case.sent + (case.failure == "http_500")
    assert case.at_least_s <= answer.seconds <= case.at_most_s
    assert stats.retries == ({case.cause: case.sent - 1} if case.cause else {})
    if case.failure is None:
        assert answer.value == (8.0, 6.5) and answer.failure is None
    else:
        assert answer.value is None
        assert answer.failure is not None and answer.failure.startswith(f"{case.failure}: ")


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 405, 422])
def test_a_wrong_configuration_stops_at_the_first_request(status: int) -> None:
    headers = {"Location": "/elsewhere"} if status == 301 else {}
    fault = Fault(status, body='{"error": "the very reason"}', headers=headers)
    started = time.monotonic()
    with FaultyJudge(after=fault) as judge, pytest.raises(JudgeRefused) as refused:
        ask(judge, Case([], 1))
    assert len(judge.requests) == 1 and time.monotonic() - started < 15
    message = str(refused.value)
    print(f"\n| {status} | 1 | {time.monotonic() - started:.2f} | {message!r} |", end="")
    assert f"{judge.api_base}/chat/completions" in message and f"HTTP {status}" in message
    assert "the very reason" in message and "Remedy: " in message


def test_a_judge_that_grades_others_may_refuse_one_question() -> None:
    """A moderated or overlong question must not end a run that works."""
    with FaultyJudge([Fault(), Fault(400, body="content policy")]) as judge:
        questions = [pair_question(text) for text in "abc"]
        first, second, third = answers_of(judge.client(), questions, at_once=False)
    assert first.value == third.value == (8.0, 6.5)
    assert second.failure == "refused: HTTP 400 content policy" and second.attempts == 1


def test_a_judge_that_accepts_one_picture_and_refuses_two_stops_the_run() -> None:
    picture = Image.new("RGB", (8, 8))
    questions = [pair_question("one", picture), pair_question(picture, "two", picture)]
    faults = [Fault(), Fault(400, body="at most 1 image per prompt")]
    with FaultyJudge(faults) as judge, pytest.raises(JudgeRefused, match="at most 1 image"):
        answers_of(judge.client(), questions, at_once=False)


@pytest.mark.slow
def test_a_short_outage_loses_no_answer_and_sends_few_requests(monkeypatch) -> None:
    """Down for 6 time-outs (12 minutes at the default 120 s), then back: all 24 are answered."""
    outage_s = 2.4

    async def script(client: JudgeClient) -> tuple[list[Answer[Any]], int, float]:
        await ask_all(client, 1, first=900)
        started_s = time.monotonic()
        asking = asyncio.ensure_future(ask_all(client, 24))
        await asyncio.sleep(outage_s)
        sent_while_down, down_s = len(judge.requests), time.monotonic() - started_s
        judge.after = Fault()
        return await asking, sent_while_down, down_s

    monkeypatch.setattr("rl.judge.client.SUSPECT_FAILURES", 8)
    config = {"timeout_s": 0.4, "max_concurrency": 8, "max_attempts": 3}
    with FaultyJudge([Fault()], after=Fault(stall_s=1.2)) as judge:
        (answers, sent_while_down, down_s), client = with_client(judge, script, **config)
    stats = client.take_stats()
    print(f"\n| stalls for {outage_s} s | {sent_while_down} while down | {stats} |", end="")
    assert all(answer.value == (8.0, 6.5) for answer in answers)
    assert stats.breaker_openings == 1
    # One, 8 at once, at most one more round before the check failed, then a check per 0.125 s.
    assert sent_while_down <= 1 + 2 * 8 + down_s / 0.125 + 1


@pytest.mark.parametrize("fault", [Fault(reset=True), Fault(stall_s=0.2)], ids=["reset", "stall"])
def test_a_single_question_survives_an_outage(fault: Fault) -> None:
    async def script(client: JudgeClient) -> list[Answer[Any]]:
        await ask_all(client, 1, first=900)
        asking = asyncio.ensure_future(ask_all(client, 1))
        await asyncio.sleep(1.0)
        judge.after = Fault()
        return await asking

    with FaultyJudge([Fault()], after=fault) as judge:
        [answer], client = with_client(judge, script, timeout_s=0.1, max_attempts=2)
    assert answer.value == (8.0, 6.5) and answer.attempts > 2
    assert client.take_stats().breaker_openings == 1


def test_an_outage_beyond_the_limit_leaves_answers_ungraded() -> None:
    async def script(client: JudgeClient) -> list[Answer[Any]]:
        await ask_all(client, 1, first=900)
        lost = await ask_all(client, 4)
        judge.after = Fault()
        await asyncio.sleep(0.2)
        return [*lost, *await ask_all(client, 1)]

    config = {"max_outage_s": 0.5, "max_attempts": 2}
    with FaultyJudge([Fault()], after=Fault(reset=True)) as judge:
        (*lost, back), _ = with_client(judge, script, **config)
    assert {(answer.failure or "").partition(":")[0] for answer in lost} == {"outage"}
    assert all(answer.seconds < 4 for answer in lost)
    assert back.value == (8.0, 6.5), "a judge that recovers between iterations is used again"


@pytest.mark.parametrize(
    "silence",
    [
        Fault(stall_s=3.0),
        Fault(raw=lambda: [b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{"], keeps_open=True),
        Fault(trickle_s=0.2),
    ],
    ids=["nothing", "half a reply", "a byte at a time"],
)
def test_questions_to_a_silent_judge_end_in_a_computable_time(silence: Fault, monkeypatch) -> None:
    """By `max_outage_s` and one time-out, though a check takes longer than the pause before the
    next; new questions, of a later iteration, at once."""
    monkeypatch.setattr("rl.judge.client.SUSPECT_FAILURES", 8)
    config = {"timeout_s": 0.6, "max_outage_s": 1.5}

    async def script(client: JudgeClient) -> list[tuple[list[Answer[Any]], float]]:
        await ask_all(client, 1, first=900)
        rounds = []
        for first in (0, 100):
            started_s = time.monotonic()
            rounds.append((await ask_all(client, 24, first), time.monotonic() - started_s))
        return rounds

    with FaultyJudge([Fault()], after=silence) as judge:
        ((first, first_s), (later, later_s)), _ = with_client(
            judge, script, max_concurrency=8, **config
        )
    for answer in [*first, *later]:
        assert answer.value is None and "outage" in (answer.failure or "")
    assert first_s < 1.5 + 0.6 + 1.0
    assert later_s < 0.6 + 1.0


@pytest.mark.parametrize("reason", ["length", "content_filter"])
def test_a_reply_that_was_cut_or_filtered_is_no_grade(reason: str, tmp_path: Path) -> None:
    """It is asked again with another seed; the journal keeps what it was."""
    choice = {"message": {"content": GOOD}, "finish_reason": reason}
    cut = Fault(body=json.dumps({"choices": [choice]}))
    with FaultyJudge([cut], Fault()) as judge:
        journal = tmp_path / "replies.jsonl"
        [answer] = answers_of(judge.client(journal), [pair_question()])
        assert answer.value == (8.0, 6.5) and answer.attempts == 2
        assert judge.requests[0]["seed"] != judge.requests[1]["seed"]
        [again] = answers_of(judge.client(journal), [pair_question()])
        assert again.replies == answer.replies and again.attempts == 0
    with FaultyJudge(after=cut) as judge:
        [answer] = answers_of(judge.client(max_attempts=2), [pair_question()])
    assert answer.value is None and reason in (answer.failure or "")


@pytest.mark.parametrize("status", [201, 203, 206])
def test_every_2xx_with_a_readable_reply_is_an_answer(status: int) -> None:
    with FaultyJudge(after=Fault(status)) as judge:
        [answer] = answers_of(judge.client(), [pair_question()])
    assert answer.value == (8.0, 6.5) and answer.attempts == 1


@pytest.mark.parametrize("status", [400, 409, 413, 418, 451, 499])
def test_an_odd_status_costs_one_question_once_others_were_answered(status: int) -> None:
    questions = [pair_question(str(n)) for n in range(3)]
    with FaultyJudge([Fault(), Fault(status)]) as judge:
        answers = answers_of(judge.client(), questions, at_once=False)
    assert [answer.value is None for answer in answers] == [False, True, False]
    with FaultyJudge(after=Fault(status)) as judge, pytest.raises(JudgeRefused, match=str(status)):
        answers_of(judge.client(), questions[:1])


@pytest.mark.parametrize("status", [401, 402, 403, 404])
def test_a_key_or_path_that_is_refused_stops_the_run_whenever_it_happens(status: int) -> None:
    questions = [pair_question(str(n)) for n in range(2)]
    with FaultyJudge([Fault(), Fault(status)]) as judge, pytest.raises(JudgeRefused):
        answers_of(judge.client(), questions, at_once=False)


@pytest.mark.parametrize(("num_failures", "most_s"), [(1, 2), (2, 4), (4, 16), (5, 30), (99, 30)])
def test_backoff_is_full_jitter_under_a_doubling_bound(num_failures: int, most_s: float) -> None:
    rng = random.Random(0)
    pauses = [backoff_s(2.0, num_failures, rng) for _ in range(500)]
    assert 0 <= min(pauses) < 0.05 * most_s and 0.95 * most_s < max(pauses) <= most_s
