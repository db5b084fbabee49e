"""The reward `format` is 1 if the whole completion has the required form, else 0."""

from __future__ import annotations

import time

import pytest
from tiny_rewards import grade_of

from rl.rewards.accuracy import Format

GOOD = "<think>two and two</think><answer>4</answer>"


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        "\n <think>\ntwo\n\nand two</think>\n\n<answer> 4 </answer> \n",
        "<think>a < b and <b>bold</b></think><answer>4</answer>",
    ],
)
def test_the_required_form_scores_1(text: str) -> None:
    assert grade_of(Format, text).value == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4",
        "<answer>4</answer>",
        "<think>two and two</think>",
        "<answer>4</answer><think>two and two</think>",
        "<think></think><answer>4</answer>",
        "<think>two</think><answer> \n </answer>",
        f"So: {GOOD}",
        f"{GOOD} That is it.",
        "<think>two</think> hence <answer>4</answer>",
        "<think>a</think><think>b</think><answer>4</answer>",
        f"{GOOD}<answer>5</answer>",
        "<think>I write <answer>3</answer></think><answer>4</answer>",
        "<think>two<answer>4</answer></think>",
        "<think>two</think><answer>4",
        "<think>two</think><answer>4</answer></answer>",
        "<Think>two</Think><Answer>4</Answer>",
        "<think>two</think ><answer>4</answer>",
        "</think>two<think><answer>4</answer>",
    ],
)
def test_any_other_form_scores_0(text: str) -> None:
    grade = grade_of(Format, text)
    assert grade.value == 0.0 and grade.failure is None


def test_a_hostile_completion_is_read_in_linear_time() -> None:
    """Where time grows with the square, 8 times the length takes 64 times as long."""
    seconds = []
    for num in (20_000, 160_000):
        start_s = time.perf_counter()
        assert grade_of(Format, "<think>" * num + "</think>" * num).value == 0.0
        seconds.append(time.perf_counter() - start_s)
    assert seconds[1] < 24 * seconds[0] + 0.1
