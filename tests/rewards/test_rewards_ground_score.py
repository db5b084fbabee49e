"""ground_score's arithmetic, what the judge sees, and EARL's composition with VIEScore."""

from __future__ import annotations

import json
from typing import Any

import pytest
from PIL import Image
from tiny_faulty_judge import Fault, FaultyJudge
from tiny_rewards import ask

from rl.algorithm.compose import compose
from rl.api.types import RewardInput, Sample
from rl.config.schema import FinalReward
from rl.judge.question import picture_part
from rl.rewards import ground_score, viescore

SOURCE = Image.new("RGB", (16, 16), (10, 20, 30))
TARGET = Image.new("RGB", (16, 16), (0, 200, 0))
EDITED = Image.new("RGB", (16, 16), (200, 20, 30))
SAMPLE = Sample("a", "paint the sky red", sources=(SOURCE,), target=TARGET)
EVIDENCE = RewardInput(SAMPLE, "a rewrite", EDITED)


def score(value: Any) -> Fault:
    return Fault(reply=f'{{"reasoning": "r", "score": {value}}}')


def test_a_tenth_of_the_score() -> None:
    with FaultyJudge([score(7.5)]) as judge:
        result = ask(ground_score, judge, EVIDENCE)
    assert result.value == 0.75 and result.parts == {"score": 7.5}
    assert len(result.replies) == 1 and result.failure is None and result.seconds > 0


def test_the_judge_sees_reference_and_edit_and_nothing_else() -> None:
    with FaultyJudge(after=score(5)) as judge:
        ask(ground_score, judge, EVIDENCE)
        ask(ground_score, judge, RewardInput(Sample("a", "x", target=EDITED), "", TARGET))
    first, second = (request["messages"][0]["content"] for request in judge.requests)
    assert [part["type"] for part in first] == ["image_url", "text", "image_url"]
    assert first[0] == second[2] != first[2] == second[0]
    assert first[0] == json.loads(picture_part(TARGET, 16)), "the reference comes first"
    for words in (SAMPLE.instruction, "a rewrite", "{instruction}"):
        assert words not in first[1]["text"]


def test_the_root_of_perceptual_quality_times_ground_score() -> None:
    """PQ = min(9, 4) = 4 of 10, ground score 9 of 10: sqrt(.4 * .9) = .6."""
    with FaultyJudge([Fault(reply='{"score": [9, 4]}')] * 2 + [score(9)]) as judge:
        vie = ask(viescore, judge, EVIDENCE)
        ground = ask(ground_score, judge, EVIDENCE)
    final = FinalReward(op="geometric_mean", weights={"viescore/pq_01": 1, "ground_score": 1})
    values = {
        "viescore": vie.value,
        "ground_score": ground.value,
        **{f"viescore/{part}": value for part, value in vie.parts.items()},
    }
    assert "pq_01" in viescore.VieScore.unit_parts, "so the config check lets it be named"
    assert compose(values, final) == pytest.approx(0.6)
    assert compose({**values, "viescore": None}, final) == pytest.approx(0.6)
    assert compose({**values, "ground_score": None}, final) is None
    assert compose({**values, "ground_score": 0.0}, final) == 0
