"""How the judge client handles each fault of a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import random
import threading
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
    ask_one,
    dripping,
    envelope,
    page,
    pair_question,
    with_client,
)
from tiny_messages import holds

from rl.judge.client import Answer, JudgeClient, JudgeRefused, backoff_s


@dataclass(frozen=True)
class Case:
    """One fault and its expected outcome."""

    faults: list[Fault]
    sent: int
    """Expected number of requests."""
    cause: str | None = None
    """The expected reason of each retry."""
    failure: str = ""
    """First word of the answer's failure; "": the answer has a value."""
    at_least_s: float = 0.0
    at_most_s: float = 15.0
    config: dict[str, Any] = field(default_factory=dict)


def _in_two_seconds() -> str:
    """HTTP dates have whole seconds, so this is 1 to 2 s from now."""
    return format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)


SLOW_DRIP = dripping(b" ", b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")
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
    "reply cut in the middle": Case([page(envelope(), length=10**6)], 2, "transport"),
    "stall beyond the time-out": Case(
        [Fault(stall_s=4.0)], 2, "timeout", at_least_s=1.5, config={"timeout_s": 1.5}
    ),
    "reply that trickles past the time-out": Case(
        [SLOW_DRIP], 2, "timeout", at_least_s=1.5, config={"timeout_s": 1.5}
    ),
    "prose": Case([Fault(reply="A lovely edit, 9 of 10.")], 2, "unreadable"),
    **{str(status): Case([Fault(status)], sent=1) for status in (201, 203, 206)},
    "unreadable for ever": Case(
        [Fault(reply="no")] * 9, 6, "unreadable", failure="unreadable"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_fault_has_its_expected_retries_and_outcome(name: str) -> None:
    case = CASES[name]
    with FaultyJudge(case.faults) as judge:
        answer, stats = ask_one(judge, **case.config)
    assert answer.attempts == len(judge.requests) == case.sent
    # Before a question is given up for its failures, the judge is asked whether it lives.
    assert stats.requests == case.sent + (case.failure == "http_500")
    assert case.at_least_s <= answer.seconds <= case.at_most_s
    assert stats.retries == ({case.cause: case.sent - 1} if case.cause else {})
    assert (answer.failure or "").partition(":")[0] == case.failure
    assert answer.value == (None if case.failure else (8.0, 6.5))


@pytest.mark.parametrize(
    ("status", "num_before"),
    [
        *((n, 0) for n in (301, 400, 401, 403, 404, 405, 422)),
        *((n, 1) for n in (401, 402, 403, 404)),
    ],
)
def test_a_wrong_configuration_stops_at_the_first_request(status: int, num_before: int) -> None:
    """A key or path that is refused, whenever it happens."""
    headers = {"Location": "/elsewhere"} if status == 301 else {}
    fault = Fault(status, body='{"error": "the very reason"}', headers=headers)
    faults, refusal = [Fault()] * num_before, pytest.raises(JudgeRefused)
    with FaultyJudge(faults, after=fault) as judge, refusal as refused:
        answers_of(judge.client(), map(pair_question, "ab"))
    assert len(judge.requests) == num_before + 1
    parts = f"{judge.api_base}/chat/completions ... HTTP {status} ... the very reason ... Remedy: "
    assert holds(refused.value, parts)


def test_a_judge_that_accepts_one_picture_and_refuses_two_stops_the_run() -> None:
    picture = Image.new("RGB", (8, 8))
    questions = [pair_question("one", picture), pair_question(picture, "two", picture)]
    faults = [Fault(), Fault(400, body="at most 1 image per prompt")]
    with FaultyJudge(faults) as judge, pytest.raises(JudgeRefused, match="at most 1 image"):
        answers_of(judge.client(), questions)


@pytest.mark.parametrize("fault", [Fault(reset=True), Fault(stall_s=0.2)], ids=["reset", "stall"])
def test_a_single_question_survives_an_outage(fault: Fault) -> None:
    with FaultyJudge([Fault()], after=fault) as judge:
        client = judge.client(timeout_s=0.1, max_attempts=2)
        threading.Timer(1.0, judge.works).start()
        _, answer = answers_of(client, map(pair_question, "ab"))
    assert answer.value == (8.0, 6.5) and answer.attempts > 2
    assert client.take_stats().breaker_openings == 1


def test_an_outage_beyond_the_limit_leaves_answers_ungraded() -> None:
    async def script(client: JudgeClient) -> list[Answer[Any]]:
        await ask_all(client, 1, first=900)
        lost = await ask_all(client, 4)
        judge.after = Fault()
        await asyncio.sleep(0.2)
        return [*lost, *await ask_all(client, 1)]

    with FaultyJudge([Fault()], after=Fault(reset=True)) as judge:
        (*lost, back), _ = with_client(judge, script, max_outage_s=0.5, max_attempts=2)
    assert {(answer.failure or "").partition(":")[0] for answer in lost} == {"outage"}
    assert all(answer.seconds < 4 for answer in lost)
    assert back.value == (8.0, 6.5), "a judge that recovers between iterations is used again"


@pytest.mark.parametrize(
    "silence",
    [
        Fault(stall_s=3.0),
        Fault(raw=lambda: [b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{"], keeps_open=True),
        SLOW_DRIP,
    ],
    ids=["nothing", "half a reply", "a byte at a time"],
)
def test_questions_to_a_silent_judge_end_in_a_computable_time(silence: Fault, monkeypatch) -> None:
    """By `max_outage_s` and one time-out, though a check takes longer than the pause before the
    next; new questions, of a later iteration, at once."""
    monkeypatch.setattr("rl.judge.client.SUSPECT_FAILURES", 8)

    async def script(client: JudgeClient) -> None:
        await ask_all(client, 1, first=900)
        for first, most_s in ((0, 1.5 + 0.6 + 1.0), (100, 0.6 + 1.0)):
            started_s = time.monotonic()
            answers = await ask_all(client, 24, first)
            assert time.monotonic() - started_s < most_s
            assert all("outage" in (answer.failure or "") for answer in answers)

    with FaultyJudge([Fault()], after=silence) as judge:
        with_client(judge, script, timeout_s=0.6, max_outage_s=1.5, max_concurrency=8)


@pytest.mark.parametrize("reason", ["length", "content_filter"])
def test_a_reply_that_was_cut_or_filtered_is_no_grade(reason: str, tmp_path: Path) -> None:
    """It is asked again with another seed; the journal keeps what it was."""
    choice = {"message": {"content": GOOD}, "finish_reason": reason}
    cut = Fault(body=json.dumps({"choices": [choice]}))
    with FaultyJudge([cut, Fault()], after=cut) as judge:
        (first, _), (again, _), (lost, _) = (
            ask_one(judge, journal=tmp_path / name, max_attempts=2) for name in ("a", "a", "b")
        )
    assert first.value == (8.0, 6.5) and (first.attempts, again.attempts) == (2, 0)
    assert judge.requests[0]["seed"] != judge.requests[1]["seed"]
    assert again.replies == first.replies
    assert lost.value is None and reason in (lost.failure or "")


@pytest.mark.parametrize("status", [400, 403, 409, 413, 418, 451, 499])
def test_an_odd_status_costs_one_question_once_others_were_answered(status: int) -> None:
    """A moderated or overlong question must not end a run that works."""
    fault = Fault(status, body="content policy")
    with FaultyJudge([Fault(), fault]) as judge:
        first, second, third = answers_of(judge.client(), map(pair_question, "abc"))
    assert first.value == third.value == (8.0, 6.5)
    assert second.failure == f"refused: HTTP {status} content policy" and second.attempts == 1
    with FaultyJudge(after=fault) as judge, pytest.raises(JudgeRefused, match=str(status)):
        ask_one(judge)


@pytest.mark.parametrize(("num_failures", "most_s"), [(1, 2), (2, 4), (4, 16), (5, 30), (99, 30)])
def test_backoff_is_full_jitter_under_a_doubling_bound(num_failures: int, most_s: float) -> None:
    rng = random.Random(0)
    pauses = [backoff_s(2.0, num_failures, rng) for _ in range(500)]
    assert 0 <= min(pauses) < 0.05 * most_s and 0.95 * most_s < max(pauses) <= most_s
