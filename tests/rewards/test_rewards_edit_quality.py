"""edit_quality's arithmetic and its question, against replies written by hand."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError
from tiny_faulty_judge import Fault, FaultyJudge
from tiny_rewards import ask

from rl.api.types import RewardInput, RewardOutput, Sample
from rl.judge.client import JudgeRefused
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
        with pytest.raises(ValueError, match="n_evals=3 at judge temperature 0"):
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


def test_a_wrong_set_up_passes_through() -> None:
    with FaultyJudge(after=Fault(404)) as judge, pytest.raises(JudgeRefused):
        grade(judge)


def test_no_picture_is_no_question() -> None:
    with FaultyJudge() as judge:
        result = grade(judge, RewardInput(Sample("a", "paint"), "a rewrite", EDITED))
    assert result.value is None and (result.failure or "").startswith("no_image: ")
    assert judge.requests == []


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"prompt": "/no/such/file.txt"}, "prompt: the prompt file"),
        ({"temperature": 0}, "n_evals=3 at judge temperature 0"),
        ({"alignment_weight": 0, "quality_weight": 0}, "both 0"),
        ({"weight": 1}, "weight"),
    ],
)
def test_a_config_that_cannot_serve_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        edit_quality.Config(**config)
