"""Recomputing activations in the backward changes no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_policy
import tiny_qwen
import torch
from tiny_rounding import GRADIENT_TOL

from rl.policies import attention


def gradients(**section: Any) -> dict[str, torch.Tensor]:
    policy = tiny_policy.make_policy(**section)
    prompt = policy.build_prompt(tiny_qwen.sample(0))
    policy.module.train()
    outputs = policy.module(policy.collate([(prompt, list(range(10, 30))), (prompt, [7, 8, 9])]))
    (outputs.logprobs.sum() + outputs.hidden.float().square().sum()).backward()
    return {n: p.grad for n, p in tiny_policy.trainable(policy).items()}


ADAPTED = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("lora", [None, ADAPTED, ADAPTED | {"dropout": 0.5}])
def test_recomputing_changes_no_gradient_beyond_rounding(
    monkeypatch: pytest.MonkeyPatch, dtype: str, lora: dict[str, Any] | None
) -> None:
    torch.manual_seed(0)  # for the dropout
    recomputed = gradients(dtype=dtype, lora=lora)
    monkeypatch.setattr(attention, "spare_activations", lambda model, checkpointing: None)
    torch.manual_seed(0)
    plain = gradients(dtype=dtype, lora=lora)
    assert recomputed.keys() == plain.keys() and len(plain) > 10
    # Another dropout mask would differ by 1; rounding every product to bfloat16 differs by 0.1.
    bound = GRADIENT_TOL if dtype == "float32" else 0.3
    assert all(gradient.any() for gradient in plain.values())
    ours, theirs = (torch.cat([g[n].flatten() for n in plain]) for g in (recomputed, plain))
    assert (ours - theirs).norm() <= bound * theirs.norm()
