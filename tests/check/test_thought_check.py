"""What `--check` says of a thought that cannot be."""

from __future__ import annotations

import pytest
import tiny_config
from tiny_messages import names

from rl.api.policy import ThoughtSection
from rl.check import check_report
from rl.check.resume import check_resume


def problems(name: str, *overrides: str) -> list[str]:
    config = tiny_config.shipped(name, *overrides)
    return check_report.problems(config)


@pytest.mark.parametrize(
    ("name", "override", "parts"),
    [
        ("quickstart", "policy.thought={}", []),
        ("quickstart", "policy.thought.max_tokens=4000", ["policy.thought.max_tokens: "]),
        ("quickstart", 'policy.thought.marker=" "', ["policy.thought.marker: ... white space"]),
        ("tiny_earl", "policy.thought={}", ["policy.thought: ... emu3 ... drop"]),
    ],
)
def test_what_is_wrong_is_said_with_its_remedy(name: str, override: str, parts: list[str]) -> None:
    for problem, expected in zip(problems(name, override), parts, strict=True):
        assert names(problem, expected)


def test_a_thought_as_long_as_the_completion_leaves_no_words() -> None:
    room = "sampling.max_completion_tokens=16"
    assert problems("quickstart", "policy.thought.max_tokens=15", room) == []
    [problem] = problems("quickstart", "policy.thought.max_tokens=16", room)
    assert "sampling.max_completion_tokens = 16" in problem


@pytest.mark.parametrize("wrong", ['marker=""', "max_tokens=0", "states=both", "tag=x"])
def test_a_section_that_cannot_be_read(wrong: str) -> None:
    found = problems("quickstart", f"policy.thought.{wrong}")
    assert any(problem.startswith(f"policy.thought.{wrong.partition('=')[0]}") for problem in found)


def test_the_instruction_names_the_marker_and_off_is_off() -> None:
    assert ThoughtSection().instruction.count("{marker}") == 1
    assert tiny_config.shipped("quickstart").policy.get("thought") is None


def test_a_run_goes_on_with_its_own_thought_alone() -> None:
    before = {"run_name": "mine", "policy": {"type": "qwen2_5_vl"}, "evaluation": {}}
    off, thinking = ({"type": "qwen2_5_vl", "thought": t} for t in (None, {"marker": "</think>"}))
    assert check_resume(before, before | {"policy": off}) == [], "older runs had none"
    with pytest.raises(ValueError, match=r"policy\.thought\.marker"):
        check_resume(before, before | {"policy": thinking})
    asked = before | {"evaluation": {"thought_gain": True}}
    assert check_resume({**before, "evaluation": {"thought_gain": False}}, asked) == []
