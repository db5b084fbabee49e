"""The tiny world of riddles: its policy can solve them if it thinks, often does not, and cannot at
once; its twin is the same but for the thought."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_config import REPO, WEIGHTS

from rl.config.schema import load_config
from tiny_world import captions, riddles


@pytest.fixture(scope="module")
def writer() -> Any:
    from transformers import AutoTokenizer

    from tiny_world.builder.models import load_policy
    from tiny_world.builder.thinker import Writer

    folder = WEIGHTS / "thinker"
    return Writer(load_policy(folder), AutoTokenizer.from_pretrained(folder))


def test_the_policy_was_taught_under_the_configs_words(writer: Any) -> None:
    policy = load_config(str(REPO / "configs" / "tiny_thinking.jsonnet")).policy
    assert policy["system_prompt"] == captions.SYSTEM_PROMPT
    assert policy["thought"]["instruction"] == riddles.THINKING
    assert policy["thought"]["marker"] == riddles.MARKER


def test_the_twin_differs_in_its_thought_alone() -> None:
    one, other = (
        load_config(str(REPO / "configs" / f"{name}.jsonnet")).model_dump()
        for name in ("tiny_thinking", "tiny_thinking_twin")
    )
    assert one["policy"].pop("thought") and other["policy"].pop("thought") is None
    one["evaluation"].pop("thought_gain"), other["evaluation"].pop("thought_gain")
    assert {key for key in one if one[key] != other[key]} == {"run_name"}


def test_thinking_it_can_say_it_right_but_seldom_does(writer: Any) -> None:
    assert writer.policy.config.text_config.num_hidden_layers == 2
    assert 0.05 < writer.p_right(thinking=True) < 0.5


@pytest.mark.slow
def test_at_once_it_knows_no_more_than_chance(writer: Any) -> None:
    assert writer.p_right(thinking=False) < 1 / riddles.NUM_CHAINS
    assert writer.share_right(False, 96) < 0.45
