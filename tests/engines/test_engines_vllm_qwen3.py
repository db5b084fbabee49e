"""vLLM with a Qwen3-VL: features of all levels come from the trainer or from its own tower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_qwen
import tiny_qwen3
import torch
from tiny_engines import max_dlogp
from tiny_policy import move, randomize_lora_b, trainable
from tiny_rounding import FORWARD_TOL

from rl.api.engine import EngineSetup
from rl.api.plugin import PluginConfig
from rl.api.types import SamplingParams
from rl.engines import vllm
from rl.engines import vllm as vllm_engine
from rl.engines.transformers import TransformersEngine

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(0.7, top_p=1.0, top_k=-1, max_tokens=12, num_completions=4)
SEEDS = [7, 70, 700]


def prompts_of(policy: Any) -> list[Any]:
    """A prompt with three pictures, one with one of them, one without a picture."""
    pictures = [tiny_qwen.picture(i, 64 + 32 * i, 64) for i in range(3)]
    sources_P = [pictures, pictures[1:2], []]
    template = policy.prompts.template
    policy.prompts.template = replace(template, min_pictures=0)
    assert template.max_pictures == 3
    return [
        policy.build_prompt(replace(tiny_qwen.sample(i), sources=tuple(sources)))
        for i, sources in enumerate(sources_P)
    ]


@contextmanager
def started(policy: Any, **setup: Any) -> Iterator[vllm_engine.VllmEngine]:
    config = vllm_engine.Config(type="vllm", max_num_seqs=32)
    engine = vllm_engine.VllmEngine(config, EngineSetup(policy, "cpu", **setup))
    try:
        yield engine
    finally:
        engine.close()


def parameters_of(engine: vllm_engine.VllmEngine) -> list[str]:
    [names] = engine._llm.collective_rpc(
        lambda worker: [name for name, _ in worker.model_runner.get_model().named_parameters()]
    )
    return list(names)


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_and_features_of_all_levels_give_the_trainers_log_probs(
    tmp_path: Path, tied: bool
) -> None:
    """The adapter slots equal the sent weights bit for bit after each sync."""
    policy = tiny_qwen3.make_qwen3(tiny_qwen3.save_policy_folder(tmp_path, tied=tied))
    with started(policy) as engine:
        assert not any("visual" in name for name in parameters_of(engine))
        prompts_P = prompts_of(policy)
        for iteration in range(2):
            randomize_lora_b(policy) if iteration == 0 else move(policy)
            weights = policy.export_weights(trainable(policy), iteration)
            assert engine.held_fingerprint() != weights.fingerprint
            engine.load_weights(weights)
            assert engine.held_fingerprint() == weights.fingerprint
            assert len(engine._expected) == 4 * 4, "q, k, v, o of four layers"
            completions_PG = engine.generate(prompts_P, PARAMS, SEEDS)
            assert max_dlogp(policy, prompts_P, completions_PG) <= FORWARD_TOL
        move(policy, 0.02)
        assert max_dlogp(policy, prompts_P, completions_PG) > 1e-2, "the check can fail"


def test_without_its_deepstack_features_a_picture_gives_other_log_probs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own class would drop them silently. A prompt without pictures is not affected."""
    policy = tiny_qwen3.make_qwen3(tiny_qwen3.save_policy_folder(tmp_path))
    with started(policy) as engine:
        prompts_P = prompts_of(policy)
        features_of = engine._features_of
        assert features_of is not None
        features = features_of(prompts_P)
        first_level = [None if one is None else one * (torch.arange(256) < 64) for one in features]
        monkeypatch.setattr(engine, "_features_of", lambda _: first_level)
        engine._drop_caches()
        completions_PG = engine.generate(prompts_P, PARAMS, SEEDS)
        assert max_dlogp(policy, prompts_P[:2], completions_PG[:2]) > 0.1
        assert max_dlogp(policy, prompts_P[2:], completions_PG[2:]) <= FORWARD_TOL
        monkeypatch.undo()
        engine._drop_caches()
        completions_PG = engine.generate(prompts_P, PARAMS, SEEDS)
        assert max_dlogp(policy, prompts_P, completions_PG) <= FORWARD_TOL
        peer = TransformersEngine(PluginConfig(), EngineSetup(policy, "cpu"))
        greedy = replace(PARAMS, temperature=0.0, num_completions=1)
        vllm_PG, peer_PG = (e.generate(prompts_P, greedy, SEEDS) for e in (engine, peer))
        for [sampled], [plain] in zip(vllm_PG, peer_PG, strict=True):
            assert sampled.token_ids == plain.token_ids
        assert max_dlogp(policy, prompts_P, peer.generate(prompts_P, PARAMS, SEEDS)) <= FORWARD_TOL


@pytest.mark.parametrize("tied", [False, True])
def test_full_weights_arrive_at_an_engine_with_its_own_tower(tmp_path: Path, tied: bool) -> None:
    folder = tiny_qwen3.save_policy_folder(tmp_path, tied=tied)
    policy = tiny_qwen3.make_qwen3(folder, section={"lora": None})
    with started(policy, sharded=True) as engine:
        assert any("visual" in name for name in parameters_of(engine))
        prompts_P = prompts_of(policy)
        for iteration in range(2):
            completions_PG = engine.generate(prompts_P, PARAMS, SEEDS)
            assert max_dlogp(policy, prompts_P, completions_PG) <= FORWARD_TOL
            move(policy, 0.02)
            assert max_dlogp(policy, prompts_P, completions_PG) > 1e-2, "the check can fail"
            weights = policy.export_weights(trainable(policy), iteration)
            assert engine.held_fingerprint() != weights.fingerprint
            engine.load_weights(weights)
            assert engine.held_fingerprint() == weights.fingerprint


def test_the_class_is_registered_before_a_model_is_loaded(tmp_path: Path) -> None:
    from vllm import ModelRegistry

    vllm.register_in_process(tiny_qwen3.save_policy_folder(tmp_path))
    registered = ModelRegistry.models["Qwen3VLForConditionalGeneration"]
    assert registered.load_model_cls().__name__ == "Qwen3VLWithDeepstack"
