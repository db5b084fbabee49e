"""edit_quality's arithmetic and its question, against replies written by hand."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image
from tiny_faulty_judge import Fault, FaultyJudge
from tiny_rewards import ask

from rl.api.types import RewardInput, RewardOutput, Sample
from rl.rewards import edit_quality

SOURCE = Image.new("RGB", (16, 16), (10, 20, 30))
EDITED = Image.new("RGB", (16, 16), (200, 20, 30))
EVIDENCE = RewardInput(Sample("a", "paint the sky red", sources=(SOURCE,)), "a rewrite", EDITED)


def marks(alignment: float, quality: float) -> Fault:
    return Fault(reply=f'{{"alignment": {alignment}, "quality": {quality}}}')


def grade(judge: FaultyJudge, reward_input: RewardInput = EVIDENCE, **config: Any) -> RewardOutput:
    return ask(edit_quality, judge, reward_input, config, max_attempts=1, max_concurrency=1)


def test_three_readings_by_hand() -> None:
    """alignment (.9 + .6 + .3)/3 = .6, quality (1 + .5 + .6)/3 = .7, .6*.6 + .4*.7 = .64."""
    with FaultyJudge([marks(0.9, 1), marks(0.6, 0.5), marks(0.3, 0.6)]) as judge:
        result = grade(judge)
    assert result.value == pytest.approx(0.64)
    assert result.parts == pytest.approx({"alignment": 0.6, "quality": 0.7})
    assert len(result.replies) == len(judge.requests) == 3
    assert [r["seed"] for r in judge.requests] == [0, 1000, 2000]
    assert {r["temperature"] for r in judge.requests} == {0.7}


def test_without_a_temperature_of_its_own_the_judges_is_taken() -> None:
    with FaultyJudge(after=marks(1, 1)) as judge:
        grade(judge, n_evals=1, temperature=None)
        with pytest.raises(ValueError, match=r"n_evals=3 .*temperature 0"):
            grade(judge, temperature=None)
    [request] = judge.requests
    assert request["temperature"] == 0


def test_weights_are_relative() -> None:
    """(3 * .5 + 1 * 1) / 4 = .625."""
    with FaultyJudge([marks(0.5, 1)]) as judge:
        result = grade(judge, n_evals=1, alignment_weight=3, quality_weight=1)
    assert result.value == pytest.approx(0.625)


def test_the_source_comes_first_and_the_users_words_are_asked_about() -> None:
    with FaultyJudge(after=marks(1, 1)) as judge:
        grade(judge, n_evals=1)
    content = judge.requests[0]["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "text", "image_url"]
    assert content[0] != content[2]
    assert "<instruction>\npaint the sky red\n</instruction>" in content[1]["text"]
    assert "a rewrite" not in content[1]["text"]


@pytest.mark.parametrize(
    "bad", [Fault(reply='{"alignment": 7, "quality": 0.5}'), Fault(500)], ids=["range", "500"]
)
def test_the_average_is_over_the_readings_that_could_be_had(bad: Fault) -> None:
    with FaultyJudge([marks(1, 1), bad, marks(0.5, 0)]) as judge:
        result = grade(judge)
    assert result.value == pytest.approx(0.6 * 0.75 + 0.4 * 0.5) and result.failure is None


def test_no_reading_is_no_value() -> None:
    with FaultyJudge(after=Fault(reply="seven")) as judge:
        result = grade(judge)
    assert result.value is None and result.replies == ("seven",) * 3
    assert (result.failure or "").startswith("unreadable: ")
