"""The tiny policy sometimes solves riddles if it thinks, and only guesses if it does not."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_config import REPO, WEIGHTS

from rl.config.schema import load_config
from tiny_world import riddles


@pytest.fixture(scope="module")
def writer() -> Any:
    from transformers import AutoTokenizer

    from tiny_world.builder.models import load_policy
    from tiny_world.builder.thinker import Writer

    folder = WEIGHTS / "thinker"
    return Writer(load_policy(folder), AutoTokenizer.from_pretrained(folder))


def test_the_tiny_config_has_the_thought_of_the_policys_training() -> None:
    thought = load_config(REPO / "configs/tiny_thinking.jsonnet").policy["thought"]
    assert (thought["instruction"], thought["marker"]) == (riddles.THINKING, riddles.MARKER)


def test_the_twin_config_differs_only_in_the_thought() -> None:
    config, twin = (
        load_config(str(REPO / "configs" / f"{name}.jsonnet")).model_dump()
        for name in ("tiny_thinking", "tiny_thinking_twin")
    )
    assert config["policy"].pop("thought") and twin["policy"].pop("thought") is None
    config["evaluation"].pop("thought_gain"), twin["evaluation"].pop("thought_gain")
    assert {key for key in config if config[key] != twin[key]} == {"run_name"}


def test_the_untrained_policy_solves_riddles_sometimes_if_it_thinks(writer: Any) -> None:
    assert writer.policy.config.text_config.num_hidden_layers == 2
    assert 0.05 < writer.p_right(thinking=True) < 0.5


@pytest.mark.slow
def test_without_thinking_the_policy_is_no_better_than_chance(writer: Any) -> None:
    assert writer.p_right(thinking=False) < 1 / riddles.NUM_CHAINS
    assert writer.share_right(False, 96) < 0.45
