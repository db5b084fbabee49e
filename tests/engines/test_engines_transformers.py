"""The transformers engine: which tokens it samples, how often, and with which log-probs."""

import pytest
import tiny_qwen
import torch
from tiny_engines import (
    assert_ended,
    assert_same,
    assert_seeded,
    export,
    max_dlogp,
    plain_engine,
    sampling,
)
from tiny_policy import make, trainable
from tiny_rounding import FORWARD_TOL

PARAMS, GREEDY = sampling(0.7), sampling(0.0, max_tokens=6, num_completions=2)


@pytest.fixture(scope="module")
def policy():
    return make(lora=None)


@pytest.fixture(scope="module")
def engine(policy):
    return plain_engine(policy)


@pytest.fixture(scope="module")
def prompts_P(policy):
    return [policy.build_prompt(tiny_qwen.sample(i, width=64 * (i + 1))) for i in range(3)]


def test_logprobs_are_the_trainers(engine, policy, prompts_P):
    """Decoding step by step with a cache gives the distribution of one packed forward."""
    completions_PG = engine.generate(prompts_P, PARAMS, [7, 70, 700])
    assert max_dlogp(policy, prompts_P, completions_PG) < FORWARD_TOL


def test_a_completion_depends_on_its_prompt_and_seed_alone(engine, prompts_P):
    assert_seeded(engine, prompts_P, PARAMS)


def test_a_completion_ends_with_its_stop_token_or_at_the_limit(engine, policy, prompts_P):
    assert_ended(engine, prompts_P[0], policy.stop_token_ids)


def test_temperature_zero_takes_the_likeliest_token(engine, policy, prompts_P):
    [[first, second]] = engine.generate(prompts_P[:1], GREEDY, [3])
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
        [[before, _]] = engine.generate(prompts_P[:1], GREEDY, [0])
        saved = head[banned].clone()
        head[banned] = 3 * head[before.token_ids[0]]
        try:
            groups = engine.generate(prompts_P, PARAMS, [1, 2, 3])
        finally:
            head[banned] = saved
    drawn = {token for group in groups for c in group for token in c.token_ids}
    assert not drawn & set(policy.banned_token_ids)


def distribution(engine, probs, **params):
    wide = torch.full((1, 600), float("-inf"))
    wide[0, : len(probs)] = torch.tensor(probs).log()
    return engine._distribution(wide, sampling(**params))[0, : len(probs)].exp()


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
    params = sampling(0.7, max_tokens=1, num_completions=4000)
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
    fingerprint = export(policy).fingerprint
    assert engine.held_fingerprint() == fingerprint
    next(iter(trainable(policy).values())).data.view(-1)[:1] += 1
    assert engine.held_fingerprint() == export(policy).fingerprint != fingerprint
