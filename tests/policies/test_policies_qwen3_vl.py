"""A tiny Qwen3-VL policy against plain transformers: only what differs from Qwen2.5-VL."""

from __future__ import annotations

import padded_reference
import pytest
import tiny_qwen
import torch
from tiny_calls import pictures_read
from tiny_policy import make, saved, trainable
from tiny_rounding import FORWARD_TOL
from tiny_rows import logprobs, mixed_rows, random_rows

from rl.api.policy import PolicySetup
from rl.api.types import Sample
from rl.policies.qwen_vl import Qwen25VL


def test_deepstack_features_change_the_result_and_are_kept_per_picture() -> None:
    policy = make("qwen3_vl")
    rows = mixed_rows(policy)
    features = policy.picture_features([rows[0][0], rows[4][0], rows[5][0]])
    assert [None if one is None else tuple(one.shape) for one in features] == [
        (9 + 8 + 8, 4 * 64), None, (8, 4 * 64)
    ]  # fmt: skip
    assert torch.equal(features[0][9:17], features[2])
    read = pictures_read(policy)
    whole = logprobs(policy, rows)
    assert not read, "the forwards use the kept features"
    kept = policy.module._features._kept
    for key, one in dict(kept).items():
        kept[key] = one * (torch.arange(4 * 64) < 64)
    assert (logprobs(policy, rows) - whole).abs().max() > 0.1


def test_a_trained_tower_runs_for_prompts_without_pictures_too() -> None:
    """Other ranks may have pictures, so every rank's backward must reach the tower."""
    policy = make("qwen3_vl", lora=None, freeze_vision_tower=False)
    rows = random_rows(policy, [Sample(name, "paint it red") for name in "abc"])
    expected = torch.cat([padded_reference.qwen_row(policy, *row)[1] for row in rows]).detach()
    logprobs = policy.module(policy.collate(rows)).logprobs
    ours = torch.cat([logprobs[b, : len(ids)] for b, (_, ids) in enumerate(rows)])
    assert torch.allclose(ours.double(), expected.double(), rtol=0, atol=FORWARD_TOL)
    logprobs.sum().backward()
    grads = {name: p.grad for name, p in trainable(policy).items() if "visual" in name}
    assert all(grad is not None and not grad.any() for grad in grads.values())


def test_a_model_of_another_family_is_refused() -> None:
    """The config is checked when the policy is built."""
    with pytest.raises(ValueError, match=r"is a 'qwen3_vl', which policy.type 'qwen2_5_vl' does"):
        Qwen25VL(
            Qwen25VL.Config(type="qwen2_5_vl", model_path=saved("qwen3_vl")), PolicySetup("text")
        )


def test_there_is_only_one_stock_arm() -> None:
    """Its pipeline passes token types on, so there is no arm without them."""
    policy = make("qwen3_vl")
    assert set(policy.stock_arms(policy.build_prompt(tiny_qwen.sample(0)))) == {"stock"}
