"""vLLM with a Qwen3-VL: features of all levels come from the trainer or from its own tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny_qwen
import torch
from tiny_engines import (
    assert_follows,
    max_dlogp,
    parameters_of,
    plain_engine,
    sampling,
    started,
    token_ids,
)
from tiny_policy import make, saved
from tiny_rounding import FORWARD_TOL

from rl.engines import vllm

pytestmark = pytest.mark.slow

PARAMS = sampling(0.7)
SEEDS = [7, 70, 700]


def prompts_of(policy: Any) -> list[Any]:
    """A prompt with three pictures, one with one of them, one without a picture."""
    pictures = [tiny_qwen.picture(i, 64 + 32 * i, 64) for i in range(3)]
    return [
        policy.build_prompt(replace(tiny_qwen.sample(i), sources=tuple(sources)))
        for i, sources in enumerate([pictures, pictures[1:2], []])
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_and_features_of_all_levels_give_the_trainers_log_probs(tied: bool) -> None:
    """The adapter slots equal the sent weights bit for bit after each sync."""
    policy = make(saved("qwen3_vl", tied=tied))
    with started(policy) as engine:
        assert not any("visual" in name for name in parameters_of(engine))
        assert_follows(engine, policy, prompts_of(policy), PARAMS, scale=0.1)
        assert len(engine._expected) == 4 * 4, "q, k, v, o of four layers"


def test_without_its_deepstack_features_a_picture_gives_other_log_probs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own class would drop them silently. A prompt without pictures is not affected."""
    policy = make("qwen3_vl")
    with started(policy) as engine:
        prompts_P = prompts_of(policy)
        features = engine._features_of(prompts_P)
        first_level = [None if one is None else one * (torch.arange(256) < 64) for one in features]
        monkeypatch.setattr(engine, "_features_of", lambda _: first_level)
        engine._llm.reset_prefix_cache()
        engine._llm.llm_engine.reset_encoder_cache()
        completions_PG = engine.generate(prompts_P, PARAMS, SEEDS)
        assert max_dlogp(policy, prompts_P[:2], completions_PG[:2]) > 0.1
        assert max_dlogp(policy, prompts_P[2:], completions_PG[2:]) <= FORWARD_TOL
        monkeypatch.undo()
        engine._llm.reset_prefix_cache()
        engine._llm.llm_engine.reset_encoder_cache()
        peer = plain_engine(policy)
        for either in (engine, peer):
            completions_PG = either.generate(prompts_P, PARAMS, SEEDS)
            assert max_dlogp(policy, prompts_P, completions_PG) <= FORWARD_TOL
        greedy = replace(PARAMS, temperature=0.0, num_completions=1)
        by_vllm, plain = (each.generate(prompts_P, greedy, SEEDS) for each in (engine, peer))
        assert token_ids(by_vllm) == token_ids(plain)


@pytest.mark.parametrize("tied", [False, True])
def test_full_weights_arrive_at_an_engine_with_its_own_tower(tied: bool) -> None:
    policy = make(saved("qwen3_vl", tied=tied), lora=None)
    with started(policy, sharded=True) as engine:
        assert any("visual" in name for name in parameters_of(engine))
        assert_follows(engine, policy, prompts_of(policy), PARAMS)


def test_the_class_is_registered_before_a_model_is_loaded() -> None:
    from vllm import ModelRegistry

    vllm.register_in_process(saved("qwen3_vl"))
    registered = ModelRegistry.models["Qwen3VLForConditionalGeneration"]
    assert registered.load_model_cls().__name__ == "Qwen3VLWithDeepstack"
