"""Replies that cannot be read are told from a judge that does not answer, and counted apart."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Literal

import pytest
from tiny_faulty_judge import Fault, FaultyJudge, ask_all, with_client
from tiny_rewards import RESULT, ScriptedJudge, make
from tiny_run import SAMPLE, episode, run_config

from rl.algorithm.metrics import Metrics
from rl.api.judge import Answer
from rl.api.types import (
    Action,
    Completion,
    Prompt,
    RenderFailure,
    RewardInput,
    RewardOutput,
    Status,
    is_unreadable,
)
from rl.ranks.dist import Dist
from rl.rewards.judged import VieScore
from rl.rollout.episodes import PendingEpisode, Picture, PictureAndText, episode_of, scores
from rl.rollout.stream import Rollout
from rl.run.episode_metrics import rollout_metrics

TIMEOUT = RewardOutput(None, failure="timeout: no reply within 4 s")
PROSE = RewardOutput(None, failure="unreadable: no JSON object (6 tries)")
FAIR = RewardOutput(0.5)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(reply="A fine edit."), "unreadable"),
        (Fault(reply='{"score": [11, 5]}'), "unreadable"),
        (Fault(reply=""), "unreadable"),
        (Fault(400, body="content policy"), "unreadable"),
        (Fault(500), "transport"),
        (Fault(429), "transport"),
        (Fault(reset=True), "transport"),
        (Fault(stall_s=0.6), "transport"),
        (Fault(body="<html>gateway</html>"), "transport"),
    ],
)
def test_each_question_that_is_given_up_counts_as_one_kind(fault: Fault, kind: str) -> None:
    config = {"max_attempts": 2, "timeout_s": 0.3, "max_outage_s": 1.0}

    async def script(client: Any) -> Any:
        answered = await ask_all(client, 1)
        judge.after = fault
        return answered, await ask_all(client, 2, first=10)

    with FaultyJudge() as judge:
        (answered, failed), client = with_client(judge, script, **config)
    assert answered[0].value and [answer.value for answer in failed] == [None, None]
    assert client.take_stats().failed == {kind: 2}
    assert [is_unreadable(answer.failure) for answer in failed] == [kind == "unreadable"] * 2


@pytest.mark.parametrize(
    ("failures", "unreadable", "value"),
    [
        (["", "unreadable: x"], "ungraded", None),
        (["", "unreadable: x"], "lowest", 0.0),
        (["refused: HTTP 400", "unreadable: x"], "lowest", 0.0),
        (["unreadable: x", "timeout: y"], "lowest", None),  # a time-out says nothing about it
        (["outage: y", "unreadable: x"], "lowest", None),
        (["", "http_500: y"], "lowest", None),
        (["", ""], "lowest", 0.5),
    ],
)
def test_only_unreadable_replies_count_as_the_lowest_rating(
    failures: list[str], unreadable: Literal["ungraded", "lowest"], value: float | None
) -> None:
    answers = [Answer(None if text else (5, 5), (), text or None, 1, 0.1) for text in failures]
    reward = make(VieScore, VieScore.Config(), ScriptedJudge(*answers))
    [output] = asyncio.run(scores(reward, [RewardInput(SAMPLE, "words", RESULT)], unreadable))
    assert output.value == value
    if value == 0.0:
        assert output.parts == {"sc_01": 0.0, "pq_01": 0.0} and is_unreadable(output.failure)


@pytest.mark.parametrize(
    ("verdicts", "key", "status", "is_counted"),
    [
        ([{"judge": PROSE}], "ungraded", Status.UNGRADED, True),
        ([{"judge": TIMEOUT}], "ungraded", Status.UNGRADED, False),
        ([{"judge": PROSE, "other": TIMEOUT}], "ungraded", Status.UNGRADED, False),
        ([{"judge": PROSE, "other": FAIR}], "ungraded", Status.UNGRADED, True),
        ([{"judge": PROSE}, RenderFailure("lost")], "ungraded", Status.UNGRADED, False),
        ([{"judge": PROSE}, {"judge": FAIR}], "ungraded", Status.SCORED, False),
        ([{"judge": FAIR}], "ungraded", Status.SCORED, False),
        ([{"judge": replace(PROSE, value=0.0)}], "lowest", Status.SCORED, True),
        ([{"judge": FAIR}], "lowest", Status.SCORED, False),
    ],
)
def test_an_episode_says_whether_its_replies_were_unreadable(
    verdicts: list[Any], key: str, status: Status, is_counted: bool
) -> None:
    """One picture per verdict: its grades, or the renderer's failure."""
    words = Completion((5,), (-0.5,), "stop")
    base = RewardInput(SAMPLE, "words", None)
    pairs = []
    for n, result in enumerate(verdicts):
        failed = isinstance(result, RenderFailure)
        picture = Picture(0, n, drawn_of=base.sample, outcome=result if failed else RESULT)
        pairs.append(PictureAndText(picture, base, {} if failed else result))
    pending = PendingEpisode(Prompt(SAMPLE, (1,)), words, Action("words", "words"), None, pairs)
    found = episode_of(run_config(judge={"unreadable": key}), pending, "g", 1)
    assert found.status is status and found.unreadable == is_counted
    assert (found.failure is None) == (verdicts == [{"judge": FAIR}])


def test_unreadable_replies_are_counted_by_kind_of_instruction_and_by_group() -> None:
    lost = {"status": Status.UNGRADED, "reward": None, "unreadable": True}
    kinds = [replace(SAMPLE, category=name) for name in ("colour", "erase")]
    colour, erase = (Prompt(sample, (1,)) for sample in kinds)
    groups = [
        [episode(prompt=colour), episode(prompt=colour), episode(prompt=colour, **lost)],
        [episode(prompt=erase, **lost), episode(prompt=erase, **lost), episode(prompt=erase)],
    ]
    metrics: Metrics = rollout_metrics(Rollout(groups, [None, None]), Dist())
    merged = Metrics.merge([metrics.state()])
    assert {name: value for name, value in merged.items() if "unreadable" in name} == pytest.approx(
        {
            "status/unreadable": 3 / 6,
            "status/unreadable/colour": 1 / 3,
            "status/unreadable/erase": 2 / 3,
            "groups/unreadable": 1 / 2,
        }
    )
