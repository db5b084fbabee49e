"""Our losses equal TRL's on the same tensors, which `make_trl_fixture.py` recorded."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.algorithm.grpo import group_advantages, loss_named, objective
from rl.api.loss import Denominators, LossInputs, LossTerms, divisor
from rl.api.types import TrainSequence
from rl.config.schema import AlgorithmConfig
from rl.learner.train_step import loss_inputs

FIXTURE = json.loads((Path(__file__).parent / "trl_losses.json").read_text())
CASES = [(batch, case) for batch in FIXTURE["batches"] for case in batch["cases"]]

OURS = {"bnpo": "dapo"}
"""TRL's name -> ours where they differ: with a single micro-batch, bnpo is the mean over tokens."""


def case_id(case: dict[str, Any]) -> str:
    return f"{case['loss']}-beta {case['beta']}-{case['correction']}"


def config_of(case: dict[str, Any]) -> AlgorithmConfig:
    """The case's settings under our keys; `cispo` does not use `clip_low`."""
    lower_bound = {} if case["loss"] == "cispo" else {"clip_low": FIXTURE["clip_low"]}
    return AlgorithmConfig(
        loss=OURS.get(case["loss"], case["loss"]),
        **lower_bound,
        clip_high=FIXTURE["clip_high"],
        kl_coeff=case["beta"],
        kl_estimator="k3",
        kl_placement="loss",
        importance_correction=case["correction"],
        importance_cap=FIXTURE["importance_cap"],
    )


def our_step(batch: dict[str, Any], config: AlgorithmConfig) -> tuple[float, torch.Tensor]:
    """(loss, [B, C] gradient by log-prob) in float32, computed with the learner's functions."""
    mask = torch.tensor(batch["mask"]).bool()
    logprobs = torch.tensor(batch["new"]).requires_grad_()
    planned = Denominators(
        num_tokens=mask.sum().item(),
        num_sequences=mask.any(-1).sum().item(),
        num_completions=len(mask),
        max_completion_tokens=FIXTURE["max_completion_tokens"],
    )
    sequences = [
        TrainSequence(tuple(row), advantage, tuple(sampler))
        for row, advantage, sampler in zip(
            mask.tolist(), batch["advantages"], batch["sampler"], strict=True
        )
    ]
    x = loss_inputs(config, sequences, logprobs, torch.tensor(batch["old"]), planned)
    reference = torch.tensor(batch["reference"]).masked_fill(~mask, 0.0)
    total = objective(config, x, reference if config.kl_coeff else None).total
    total.backward()
    # TRL's means over completions also count the one without loss tokens, whose loss is 0.
    share = 1.0
    if divisor(loss_named(config.loss), planned) == planned.num_sequences:
        share = planned.num_sequences / planned.num_completions
    return share * total.item(), share * logprobs.grad


def users_dapo(x: LossInputs) -> LossTerms:
    """DAPO's loss as a user would write it from the paper."""
    ratio = (x.logprobs - x.old_logprobs).masked_fill(~x.mask, 0.0).exp()
    bounded = ratio.clamp(1.0 - x.clip_low, 1.0 + x.clip_high)
    terms = -torch.minimum(ratio * x.advantages, bounded * x.advantages)
    weights = x.mask.float() / x.denominators.num_tokens
    return LossTerms(terms, weights, ratio.detach(), terms > -ratio * x.advantages)


@pytest.mark.parametrize(("batch", "case"), CASES, ids=[case_id(case) for _, case in CASES])
def test_a_step_has_trls_value_and_gradient(batch: dict[str, Any], case: dict[str, Any]) -> None:
    value, gradient = our_step(batch, config_of(case))
    assert value == pytest.approx(case["value"], rel=1e-6, abs=1e-7)
    torch.testing.assert_close(gradient, torch.tensor(case["gradient"]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("batch", FIXTURE["batches"])
def test_a_users_loss_is_found_by_its_dotted_path_and_equals_ours(batch: dict[str, Any]) -> None:
    assert divisor(users_dapo, Denominators(8, 4, 6, 10)) == 8
    path = f"{users_dapo.__module__}.users_dapo"
    configs = [AlgorithmConfig(loss=loss, kl_coeff=0.3) for loss in ("dapo", path)]
    (value, gradient), (other, other_gradient) = (our_step(batch, each) for each in configs)
    assert value == pytest.approx(other, rel=1e-6)
    torch.testing.assert_close(gradient, other_gradient, rtol=1e-6, atol=1e-7)


def test_the_fixture_reaches_every_branch() -> None:
    """Ratios beyond both bounds with advantages of both signs, capped weights, masked tokens."""
    for batch in FIXTURE["batches"]:
        new, old, sampler = (torch.tensor(batch[name]) for name in ("new", "old", "sampler"))
        mask, advantages = torch.tensor(batch["mask"]).bool(), torch.tensor(batch["advantages"])
        ratio = (new - old).exp()
        for beyond in (ratio < 1 - FIXTURE["clip_low"], ratio > 1 + FIXTURE["clip_high"]):
            for sign in (advantages > 0, advantages < 0):
                assert (beyond & sign[:, None] & mask).any()
        cut = (old - sampler).exp() > FIXTURE["importance_cap"]
        assert (cut & mask).any() and not mask.any(-1).all() and not mask.all()


def test_trls_advantages_differ_only_by_the_sample_deviation() -> None:
    """TRL's variance divides by n - 1, ours by n: one factor for all completions."""
    group = FIXTURE["group"]
    factor = math.sqrt(group / (group - 1))
    for batch in FIXTURE["batches"]:
        for start in range(0, len(batch["rewards"]), group):
            rewards = batch["rewards"][start : start + group]
            ours = group_advantages(rewards, "group_std", 1e-4 / factor)
            theirs = [factor * a for a in batch["advantages"][start : start + group]]
            assert ours == pytest.approx(theirs, rel=1e-5)
