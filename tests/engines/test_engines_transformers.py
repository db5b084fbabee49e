"""The transformers engine: which tokens it samples, how often, and with which log-probs."""

import pytest
import tiny_qwen
import torch
from tiny_engines import assert_ended, assert_same, max_dlogp
from tiny_rounding import FORWARD_TOL

from rl.api.engine import EngineSetup
from rl.api.plugin import PluginConfig
from rl.api.policy import PolicySetup
from rl.api.types import SamplingParams
from rl.engines import transformers as transformers_engine
from rl.policies.qwen_vl import Qwen25VL

TEMPERATURE = 0.7
PARAMS = SamplingParams(TEMPERATURE, top_p=1.0, top_k=-1, max_tokens=12, num_completions=4)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tiny_qwen.save_policy_folder(tmp_path_factory.mktemp("policy"))
    config = Qwen25VL.Config(type="", model_path=folder, dtype="float32", lora=None)
    return Qwen25VL(
        config,
        PolicySetup(
            "hidden_states",
            template=tiny_qwen.TEMPLATE,
            temperature=TEMPERATURE,
            max_completion_tokens=12,
        ),
    )


@pytest.fixture(scope="module")
def engine(policy):
    config = PluginConfig(type="transformers")
    return transformers_engine.TransformersEngine(config, EngineSetup(policy, "cpu"))


@pytest.fixture(scope="module")
def prompts_P(policy):
    return [policy.build_prompt(tiny_qwen.sample(i, width=64 * (i + 1))) for i in range(3)]


def test_logprobs_are_the_trainers(engine, policy, prompts_P):
    """Decoding step by step with a cache gives the distribution of one packed forward."""
    completions_PG = engine.generate(prompts_P, PARAMS, [7, 70, 700])
    assert max_dlogp(policy, prompts_P, completions_PG) < FORWARD_TOL


def test_completions_of_a_group_differ_whatever_the_batch_order(engine, prompts_P):
    seeds = [7, 70, 700]
    forward = engine.generate(prompts_P, PARAMS, seeds)
    backward = engine.generate(prompts_P[::-1], PARAMS, seeds[::-1])[::-1]
    assert_same(forward, backward)
    assert len({completion.token_ids for group in forward for completion in group}) == 12


def test_completion_g_is_sampled_with_seed_plus_g(engine, prompts_P):
    [group] = engine.generate(prompts_P[:1], PARAMS, [50])
    one = SamplingParams(TEMPERATURE, 1.0, -1, 12, num_completions=1)
    for g, completion in enumerate(group):
        [[alone]] = engine.generate(prompts_P[:1], one, [50 + g])
        assert alone.token_ids == completion.token_ids


def test_a_completion_ends_with_its_stop_token_or_at_the_limit(engine, policy, prompts_P):
    before = torch.get_rng_state()
    params = SamplingParams(1.5, 1.0, -1, max_tokens=12, num_completions=64)
    [group] = engine.generate(prompts_P[:1], params, [0])
    assert torch.equal(torch.get_rng_state(), before), "the global generator has not moved"
    assert_ended(group, policy.stop_token_ids, 12)


def test_temperature_zero_takes_the_likeliest_token(engine, policy, prompts_P):
    greedy = SamplingParams(0.0, 1.0, -1, max_tokens=6, num_completions=2)
    [[first, second]] = engine.generate(prompts_P[:1], greedy, [3])
    assert_same([[first]], [[second]])
    batch = policy.collate([(prompts_P[0], first.token_ids)])
    with torch.no_grad():
        hidden = policy.module(batch).hidden[len(prompts_P[0].token_ids) - 1 : -1]
        logits = policy.module.base_model.lm_head(hidden)
    logits[:, list(policy.banned_token_ids)] = float("-inf")
    assert tuple(logits.argmax(-1).tolist()) == first.token_ids


def test_banned_tokens_are_never_drawn_even_when_they_are_likeliest(engine, policy, prompts_P):
    head = policy.module.base_model.lm_head.weight
    banned = policy.banned_token_ids[-1]
    with torch.no_grad():
        [[before]] = engine.generate(prompts_P[:1], SamplingParams(0.0, 1.0, -1, 1, 1), [0])
        saved = head[banned].clone()
        head[banned] = 3 * head[before.token_ids[0]]
        try:
            groups = engine.generate(prompts_P, PARAMS, [1, 2, 3])
        finally:
            head[banned] = saved
    drawn = {token for group in groups for c in group for token in c.token_ids}
    assert not drawn & set(policy.banned_token_ids)


def distribution(engine, probs, **params):
    logits = torch.tensor([probs]).log()
    wide = torch.full((1, 600), float("-inf"))
    wide[0, : len(probs)] = logits
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": -1} | params
    out = engine._distribution(wide, SamplingParams(**settings, max_tokens=1, num_completions=1))
    return out[0, : len(probs)].exp()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.75}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.76}, [5 / 9, 2.5 / 9, 1.5 / 9, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3, 0, 0]),
        ({"temperature": 0.5}, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
    ],
)
def test_top_k_top_p_and_temperature_by_hand(engine, params, expected):
    """top_p after top_k, over what top_k left: (.5, .25, .15)/.9 -> the first two hold 0.83."""
    probs = distribution(engine, [0.5, 0.25, 0.15, 0.1], **params)
    torch.testing.assert_close(probs, torch.tensor([float(x) for x in expected]))


def test_tokens_are_drawn_as_often_as_they_are_likely(engine, prompts_P, policy):
    """First tokens of 4000 completions against the trainer's probabilities."""
    params = SamplingParams(TEMPERATURE, 1.0, -1, max_tokens=1, num_completions=4000)
    [group] = engine.generate(prompts_P[:1], params, [123])
    counts = torch.zeros(policy.module.base_model.lm_head.out_features)
    probs = torch.zeros_like(counts)
    for completion in group:
        counts[completion.token_ids[0]] += 1
        probs[completion.token_ids[0]] = torch.tensor(completion.logprobs[0]).exp()
    expected = 4000 * probs[probs > 0.01]
    chi2 = ((counts[probs > 0.01] - expected) ** 2 / expected).sum()
    degrees = len(expected)
    assert chi2 < degrees + 4 * (2 * degrees) ** 0.5


def test_the_engine_reads_the_policys_current_weights(engine, policy):
    tensors = {n: p for n, p in policy.module.named_parameters() if p.requires_grad}
    fingerprint = policy.export_weights(tensors, 1).fingerprint
    assert engine.held_fingerprint() == fingerprint
    value = next(iter(tensors.values())).data.view(-1)[:1]
    before = value.clone()
    value += 1
    assert engine.held_fingerprint() == policy.export_weights(tensors, 1).fingerprint != fingerprint
    value.copy_(before)
