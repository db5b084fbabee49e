"""Compares an engine's completions with the trainer's forward and with other completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import tiny_policy
import torch
from tiny_rounding import FORWARD_TOL

from rl.api.engine import EngineSetup
from rl.api.plugin import PluginConfig
from rl.api.types import Completion, PolicyWeights, Prompt, SamplingParams
from rl.engines import vllm as vllm_engine
from rl.engines.transformers import TransformersEngine


@contextmanager
def started(policy: Any, max_num_seqs: int = 32, **setup: Any) -> Iterator[Any]:
    """A vLLM for the policy."""
    config = vllm_engine.Config(type="vllm", max_num_seqs=max_num_seqs)
    engine = vllm_engine.VllmEngine(config, EngineSetup(policy, "cpu", **setup))
    try:
        yield engine
    finally:
        engine.close()


def parameters_of(engine: Any) -> list[str]:
    """Names of vLLM's own parameters."""
    [names] = engine._llm.collective_rpc(
        lambda worker: [name for name, _ in worker.model_runner.get_model().named_parameters()]
    )
    return list(names)


def plain_engine(policy: Any) -> TransformersEngine:
    return TransformersEngine(PluginConfig(), EngineSetup(policy, "cpu"))


def sampling(
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = -1,
    max_tokens: int = 12,
    num_completions: int = 4,
) -> SamplingParams:
    return SamplingParams(temperature, top_p, top_k, max_tokens, num_completions)


def export(policy: Any, version: int = 0) -> PolicyWeights:
    """The policy's current weights."""
    weights: PolicyWeights = policy.export_weights(tiny_policy.trainable(policy), version)
    return weights


def token_ids(completions_PG: Sequence[Sequence[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in completions_PG]


def pairs(
    prompts_P: Sequence[Prompt], completions_PG: Sequence[Sequence[Completion]]
) -> list[tuple[Prompt, Completion]]:
    """Each completion with its prompt."""
    return [(p, c) for p, group in zip(prompts_P, completions_PG, strict=True) for c in group]


def assert_follows(
    engine: Any,
    policy: Any,
    prompts_P: Sequence[Prompt],
    params: SamplingParams,
    scale: float = 0.02,
) -> list[list[Completion]]:
    """After each of two updates and syncs, and before them, the engine has the policy's log-probs;
    after an update alone it has others. Returns the last completions."""
    seeds = range(0, 1000 * len(prompts_P), 1000)
    completions_PG: list[list[Completion]] = engine.generate(prompts_P, params, seeds)
    for version in range(2):
        assert max_dlogp(policy, prompts_P, completions_PG) <= FORWARD_TOL
        tiny_policy.move(policy, scale)
        assert max_dlogp(policy, prompts_P, completions_PG) > 1e-2, "the check can fail"
        weights = export(policy, version)
        assert engine.held_fingerprint() != weights.fingerprint
        engine.load_weights(weights)
        assert engine.held_fingerprint() == weights.fingerprint
        completions_PG = engine.generate(prompts_P, params, seeds)
    assert max_dlogp(policy, prompts_P, completions_PG) <= FORWARD_TOL
    return completions_PG


def max_dlogp(
    policy: Any, prompts_P: Sequence[Prompt], completions_PG: Sequence[Sequence[Completion]]
) -> float:
    """Largest |engine - trainer| over all tokens, nats; the trainer packs each group in a row."""
    differences = []
    for prompt, group in zip(prompts_P, completions_PG, strict=True):
        batch = policy.collate([(prompt, completion.token_ids) for completion in group])
        with torch.no_grad():
            trained_GC = policy.module(batch).logprobs
        for completion, trained_C in zip(group, trained_GC, strict=True):
            sampled = torch.tensor(completion.logprobs)
            differences.append(float((trained_C[: len(sampled)] - sampled).abs().max()))
    return max(differences)


def assert_same(
    ones_PG: Sequence[Sequence[Completion]], others_PG: Sequence[Sequence[Completion]]
) -> None:
    """The same tokens; log-probs up to rounding, which depends on a row's position in a batch."""
    for one, other in zip(chain(*ones_PG), chain(*others_PG), strict=True):
        assert (one.token_ids, one.finish) == (other.token_ids, other.finish)
        assert one.logprobs == pytest.approx(other.logprobs, abs=FORWARD_TOL)


def assert_seeded(engine: Any, prompts_P: Sequence[Prompt], params: SamplingParams) -> None:
    """A completion depends on its prompt and its own seed, that of the group plus g; not on the
    others of the batch or their order. All differ."""
    seeds = [7 * 10**p for p in range(len(prompts_P))]
    completions_PG = engine.generate(prompts_P, params, seeds)
    backward_PG = engine.generate(prompts_P[::-1], params, seeds[::-1])[::-1]
    assert_same(backward_PG, completions_PG)
    drawn = [completion.token_ids for group in completions_PG for completion in group]
    assert len(set(drawn)) == len(drawn)
    one = replace(params, num_completions=1)
    for p, group in enumerate(completions_PG):
        for g, completion in enumerate(group):
            [[alone]] = engine.generate(prompts_P[p : p + 1], one, [seeds[p] + g])
            assert alone.token_ids == completion.token_ids


def assert_ended(engine: Any, prompt: Prompt, stop_ids: Sequence[int]) -> None:
    """Some completions end with their only stop token; the others have all 12 tokens and no stop.
    The trainer's generator does not move."""
    before = torch.get_rng_state()
    [group] = engine.generate([prompt], sampling(1.5, num_completions=64), [0])
    assert torch.equal(torch.get_rng_state(), before)
    for completion in group:
        ids = completion.token_ids
        stops = [i for i, token in enumerate(ids) if token in stop_ids]
        stopped = completion.finish == "stop"
        assert stops == ([len(ids) - 1] if stopped else [])
        assert stopped or len(ids) == 12
        assert len(completion.logprobs) == len(ids)
    assert {completion.finish for completion in group} == {"stop", "length"}
