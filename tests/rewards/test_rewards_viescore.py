"""VIEScore's arithmetic and its questions, against replies written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError
from tiny_faulty_judge import Fault, FaultyJudge, quick_config
from tiny_rewards import ask, make

from rl.api.types import RewardInput, RewardOutput, Sample
from rl.judge.client import JudgeClient
from rl.rewards import viescore

SOURCE = Image.new("RGB", (16, 16), (10, 20, 30))
EDITED = Image.new("RGB", (16, 16), (200, 20, 30))
EVIDENCE = RewardInput(Sample("a", "paint the {sky} red", sources=(SOURCE,)), "a rewrite", EDITED)


class PairJudge(FaultyJudge):
    """Serves `semantics` to questions with two pictures, `perception` to those with one."""

    def __init__(self, semantics: list[Fault], perception: list[Fault]) -> None:
        self.of_two, self.of_one = semantics, perception
        super().__init__()

    def begin(self, body: bytes, headers: dict[str, str]) -> Fault:
        super().begin(body, headers)
        content = self.requests[-1]["messages"][0]["content"]
        queue = self.of_two if len(content) == 3 else self.of_one
        return queue.pop(0) if len(queue) > 1 else queue[0]


def scores(first: float, second: float) -> Fault:
    return Fault(reply=f'{{"reasoning": "r", "score": [{first}, {second}]}}')


def grade(judge: FaultyJudge, reward_input: RewardInput = EVIDENCE, **config: Any) -> RewardOutput:
    return ask(viescore, judge, reward_input, config)


def test_minimum_and_geometric_mean_by_hand() -> None:
    """SC = min(9, 4) = 4, PQ = min(8.5, 9) = 8.5, overall = sqrt(34) = 5.8310, value .58310."""
    with PairJudge([scores(9, 4)], [scores(8.5, 9)]) as judge:
        result = grade(judge)
    assert result.value == pytest.approx(0.5830951895)
    assert result.parts == pytest.approx(
        {
            "edit_success": 9, "over_edit": 4, "naturalness": 8.5, "artifacts": 9,
            "sc": 4, "pq": 8.5, "overall": 5.830951895, "sc_01": 0.4, "pq_01": 0.85,
        }
    )  # fmt: skip
    assert result.failure is None and len(result.replies) == 2 and result.seconds > 0


@pytest.mark.parametrize(("sc", "pq", "value"), [((0, 10), (10, 10), 0), ((10, 10), (10, 10), 1)])
def test_the_ends_of_the_scale(sc: Any, pq: Any, value: float) -> None:
    with PairJudge([scores(*sc)], [scores(*pq)]) as judge:
        assert grade(judge).value == value


def test_what_the_judge_sees() -> None:
    with PairJudge([scores(5, 5)], [scores(5, 5)]) as judge:
        grade(judge)
    asked = sorted((r["messages"][0]["content"] for r in judge.requests), key=len)
    perception, semantics = asked
    assert [part["type"] for part in semantics] == ["image_url", "text", "image_url"]
    assert [part["type"] for part in perception] == ["text", "image_url"]
    assert semantics[2] == perception[1] != semantics[0], "the source comes first, once"
    text = semantics[1]["text"]
    assert "<instruction>\npaint the {sky} red\n</instruction>" in text
    assert '"score": [edit success, restraint]' in text
    for words in (text, perception[0]["text"]):
        assert "a rewrite" not in words, "graded against the user's words, not the policy's"
        assert "{instruction}" not in words
    assert "paint" not in perception[0]["text"]


def test_repeats_are_averaged_over_those_that_could_be_had() -> None:
    """Readings 0.5 and 1.0; the third question about meaning stays unreadable."""
    bad = Fault(reply="no idea")
    with PairJudge([scores(5, 5), scores(10, 10), bad], [scores(5, 5), scores(10, 10)]) as judge:
        # One at a time, so that the scripted order is the order of the repeats.
        config = {"n_evals": 3, "temperature": 0.7}
        result = ask(viescore, judge, EVIDENCE, config, max_concurrency=1)
    assert result.value == pytest.approx(0.75) and result.parts["edit_success"] == 7.5
    assert result.failure is None and result.replies.count("no idea") == 2
    assert {r["seed"] // 1000 for r in judge.requests} == {0, 1, 2}
    assert {r["temperature"] for r in judge.requests} == {0.7, 1.0}


@pytest.mark.parametrize("broken", ["semantics", "perception"])
def test_half_a_grade_is_none(broken: str) -> None:
    good, bad = [scores(5, 5)], [Fault(503)]
    pair = (bad, good) if broken == "semantics" else (good, bad)
    with PairJudge(*pair) as judge:
        result = grade(judge)
    assert result.value is None and result.parts == {}
    assert result.failure is not None and result.failure.startswith("http_503: ")
    assert len(result.replies) == 1, "what was said is kept"


def test_another_rubric_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text('Rate: {instruction}. Reply {"score": [a, b]}')
    with PairJudge([scores(5, 5)], [scores(5, 5)]) as judge:
        grade(judge, semantics_prompt=str(path))
    texts = {
        part["text"]
        for r in judge.requests
        for part in r["messages"][0]["content"]
        if "text" in part
    }
    assert 'Rate: paint the {sky} red. Reply {"score": [a, b]}' in texts


def test_a_prompt_without_the_instruction_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("Rate the edit <instruction>.")
    with pytest.raises(ValidationError, match=r"has no \{instruction\}"):
        viescore.Config(semantics_prompt=str(path))


def test_repeats_at_the_judges_own_temperature_0_are_refused() -> None:
    client = JudgeClient(quick_config(temperature=0), "http://127.0.0.1:1/v1")
    with pytest.raises(ValueError, match="n_evals=3"):
        make(viescore, viescore.Config(n_evals=3), client)
