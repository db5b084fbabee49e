"""Server errors about single questions: these are given up, all others are graded."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from PIL import Image
from tiny_faulty_judge import Fault, FaultyJudge, ask_all, pair_question, read_pair, with_client
from tiny_ranks import held_port

from rl.api.judge import Answer
from rl.judge.client import JudgeClient

NUM_GROUPS, GROUP = 12, 8


class Choosy(FaultyJudge):
    """Fails for the pictures of some groups; a picture's red and green are its group and number."""

    def __init__(self, bad: set[int], fault: Fault) -> None:
        self.bad, self.fault = bad, fault
        super().__init__()

    def begin(self, body: bytes, headers: dict[str, str]) -> Fault:
        url = json.loads(body)["messages"][0]["content"][0]["image_url"]["url"]
        picture = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
        super().begin(body, headers)
        return self.fault if picture.getpixel((16, 16))[0] in self.bad else Fault(stall_s=0.02)


async def ask_groups(client: JudgeClient) -> list[list[Answer[Any]]]:
    """The answers of all groups, which are asked at once, in order."""

    async def ask(group: int, member: int) -> Answer[Any]:
        picture = Image.new("RGB", (32, 32), (group, member, 9))
        return await client.ask(pair_question(picture), read_pair)

    async def ask_group(group: int) -> list[Answer[Any]]:
        return await asyncio.gather(*(ask(group, member) for member in range(GROUP)))

    return await asyncio.gather(*map(ask_group, range(NUM_GROUPS)))


def failures_of(answers: Sequence[Answer[Any]]) -> set[str]:
    return {(answer.failure or "value").partition(":")[0] for answer in answers}


@pytest.mark.parametrize(("suspect_failures", "slots"), [(1, 96), (8, 8), (20, 8)])
@pytest.mark.parametrize(
    "bad", [{0, 1, 2, 3}, {5}, {4, 5, 6, 7}, {8, 9, 10, 11}, {0, 4, 11}, set(range(11))], ids=str
)
def test_pictures_that_the_judge_fails_on_cost_only_themselves(
    bad: set[int], suspect_failures: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any position among the questions; `slots` 96: all are in flight at once."""
    monkeypatch.setattr("rl.judge.client.SUSPECT_FAILURES", suspect_failures)
    config = {"max_attempts": 3, "max_concurrency": slots, "timeout_s": 60}  # though it is busy
    with Choosy(bad, Fault(500)) as judge:
        groups, client = with_client(judge, ask_groups, **config)
    for group, answers in enumerate(groups):
        assert failures_of(answers) == ({"http_500"} if group in bad else {"value"}), group
        assert max(answer.attempts for answer in answers) <= 3
    assert client.take_stats().breaker_openings == 0


def test_pictures_that_get_a_retry_after_hold_up_no_others() -> None:
    fault = Fault(503, headers={"Retry-After": "0.3"})
    with Choosy({0, 1, 2, 3}, fault) as judge:
        groups, client = with_client(judge, ask_groups, max_concurrency=8, max_outage_s=4.0)
    for group, answers in enumerate(groups):
        assert failures_of(answers) == ({"http_503"} if group < 4 else {"value"})
    assert max(answer.seconds for answers in groups[4:] for answer in answers) < 4
    assert max(answer.seconds for answers in groups[:4] for answer in answers) < 4 + 20
    assert client.take_stats().breaker_openings == 0


STALLS = {"timeout_s": 0.4}, Fault(stall_s=1.2)
"""The outage takes 6 time-outs: 12 minutes at the default 120 s."""


@pytest.mark.parametrize(
    ("config", "fault", "num_before", "most", "down_s"),
    [
        # Each at most once, and those in flight once more.
        ({}, Fault(500), 0, 48 + 8, 0.5),
        ({}, Fault(500), 4, 4 + 48 + 8, 0.5),
        # One, 8 at once, and at most one more round before the check failed.
        pytest.param(*STALLS, 1, 1 + 2 * 8, 2.4, marks=pytest.mark.slow),
    ],
)
def test_a_judge_that_fails_on_everything_is_an_outage(
    config: dict[str, float], fault: Fault, num_before: int, most: int, down_s: float, monkeypatch
) -> None:
    """Few requests are sent, and it is waited for. `num_before`: questions answered before."""
    monkeypatch.setattr("rl.judge.client.SUSPECT_FAILURES", 8)

    async def script(client: JudgeClient) -> list[Answer[Any]]:
        before = await ask_all(client, num_before)
        judge.after = judge.models = fault
        asking = asyncio.ensure_future(ask_all(client, 48, first=100))
        while client.addresses[0].is_up:
            await asyncio.sleep(0.01)
        began_s = time.monotonic()
        await asyncio.sleep(down_s)
        # A probe per 0.2 s.
        assert len(judge.requests) <= most + 2 + (time.monotonic() - began_s) / 0.2
        judge.works()
        return [*before, *await asking]

    limits = {"max_attempts": 3, "max_concurrency": 8, "max_outage_s": 8.0}
    with FaultyJudge() as judge:
        answers, client = with_client(judge, script, **limits, **config)
    assert failures_of(answers) == {"value"}
    assert client.take_stats().breaker_openings == 1


def test_a_judge_that_fails_on_every_second_request_loses_nothing() -> None:
    with FaultyJudge([Fault(500), Fault()] * 200) as judge:
        answers, client = with_client(judge, lambda c: ask_all(c, 96), max_attempts=20)
    assert failures_of(answers) == {"value"}
    assert client.take_stats().breaker_openings == 0


@pytest.mark.parametrize("num_dead_first", [0, 1])
def test_a_dead_address_beside_one_that_fails_on_some_pictures(num_dead_first: int) -> None:
    with held_port() as port, Choosy({3}, Fault(500)) as judge:
        addresses = [judge, f"http://127.0.0.1:{port}/v1"]
        order, started_s = addresses[:: -1 if num_dead_first else 1], time.monotonic()
        groups, client = with_client(order, ask_groups, max_attempts=4, max_concurrency=8)
    assert time.monotonic() - started_s < 60
    for group, answers in enumerate(groups):
        assert failures_of(answers) == ({"http_500"} if group == 3 else {"value"}), group
    assert client.take_stats().breaker_openings == 1, "that of the dead one"
