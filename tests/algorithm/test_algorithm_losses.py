"""Losses, KL and importance weights by hand; `test_algorithm_trl.py` compares whole steps."""

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from tiny_messages import holds

from rl.algorithm.grpo import (
    Mismatch,
    effective_sample_share,
    importance_weights,
    kl_per_token,
    loss_named,
    mismatch,
    objective,
)
from rl.api.loss import Denominators, LossInputs, LossTerms, divisor
from rl.config.schema import AlgorithmConfig
from rl.ranks.signals import sentence

LOSSES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo")
LOW, HIGH = 0.2, 0.28


def tensor(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def policy_terms(
    loss: str,
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> LossTerms:
    counts = Denominators(1, 1, 1, 1)
    return loss_named(loss)(LossInputs(logprobs, old, old, advantages, mask, counts, LOW, HIGH))


def one_token(loss: str, ratio: float, advantage: float) -> tuple[float, float, bool]:
    """(term, d term / d logprob, clipped) of a single token whose old log-prob is -1."""
    logprob = tensor([[-1.0 + math.log(ratio)]]).requires_grad_()
    mask = torch.ones(1, 1, dtype=torch.bool)
    old = tensor([[-1.0]])
    terms = policy_terms(loss, logprob, old, tensor([[advantage]]), mask)
    terms.terms.sum().backward()
    return terms.terms.item(), logprob.grad.item(), bool(terms.clipped.item())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_that_overflows_costs_no_step(loss: str, advantage: float) -> None:
    """exp(100) is infinite in float32; the other token keeps its gradient."""
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-101.0, -1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    terms = policy_terms(loss, logprobs, old, torch.full((1, 2), advantage), mask)
    (terms.weights * terms.terms).sum().backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()
    assert terms.clipped[0, 0] == (advantage > 0 or loss == "cispo")
    if loss != "gspo":  # which has one ratio for both tokens
        assert logprobs.grad[0, 1] == -advantage * terms.weights[0, 1]


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "gspo"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.1, 2.0, -2.2, -2.2, False),
        (1.5, 2.0, -2.56, 0.0, True),  # above 1 + high, and better: stop pushing
        (1.5, -2.0, 3.0, 3.0, False),  # above, and worse: push all the way back
        (0.5, 2.0, -1.0, -1.0, False),  # below, and better: bring it back
        (0.5, -2.0, 1.6, 0.0, True),  # below 1 - low, and worse: stop
    ],
)
def test_clipped_surrogate_by_hand(
    loss: str, ratio: float, advantage: float, term: float, gradient: float, clipped: bool
) -> None:
    assert one_token(loss, ratio, advantage) == (
        pytest.approx(term, abs=1e-6),
        pytest.approx(gradient, abs=1e-6),
        clipped,
    )


@pytest.mark.parametrize(
    ("ratio", "weight", "clipped"), [(1.1, 1.1, False), (1.5, 1.28, True), (0.5, 0.5, False)]
)
def test_cispo_keeps_the_gradient_of_clipped_tokens(
    ratio: float, weight: float, clipped: bool
) -> None:
    term, gradient, was_clipped = one_token("cispo", ratio, -3.0)
    assert term == pytest.approx(3.0 * weight * (-1.0 + math.log(ratio)), abs=1e-6)
    assert gradient == pytest.approx(3.0 * weight, abs=1e-6)
    assert was_clipped is clipped


@pytest.mark.parametrize("d", [0.5, -0.5])
@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", lambda d: d, lambda d: 1.0),
        ("k2", lambda d: d * d / 2, lambda d: d),
        ("k3", lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
    ],
)
def test_kl_estimators_by_hand(
    estimator: str, value: Callable[[float], float], gradient: Callable[[float], float], d: float
) -> None:
    """`d`: log-prob minus the reference's. The expectation of k1's gradient is 0, because that of
    any log-prob is; so the config refuses k1 in the loss."""
    logprob = tensor([[-1.0]]).requires_grad_()
    kl = kl_per_token(logprob, tensor([[-1.0 - d]]), estimator)
    kl.sum().backward()
    assert kl.item() == pytest.approx(value(d), abs=1e-12)
    assert logprob.grad.item() == pytest.approx(gradient(d), abs=1e-12)


def test_k3_is_precise_near_zero() -> None:
    kl = kl_per_token(torch.tensor([[-1.0]]), torch.tensor([[-1.0 - 2**-12]]), "k3")
    assert kl.item() == pytest.approx(2**-25, rel=2e-3)


@pytest.mark.parametrize(
    ("correction", "cap", "expected"),
    [
        ("none", 2.0, [1.0, 1.0, 1.0]),
        ("token", 2.0, [math.exp(0.5), 2.0, 1.0]),
        ("sequence", 2.0, [2.0, 2.0, 1.0]),  # exp(0.5 + 1.0) = 4.48, cut at 2
        ("sequence", 5.0, [math.exp(1.5), math.exp(1.5), 1.0]),
    ],
)
def test_importance_weights_by_hand(correction: str, cap: float, expected: list[float]) -> None:
    old, engine = tensor([[-1.0, -1.0, -9.0]]), tensor([[-1.5, -2.0, -1.0]])
    mask = torch.tensor([[True, True, False]])
    weights = importance_weights(old, engine, mask, correction, cap)
    assert weights[0].tolist() == pytest.approx(expected, abs=1e-12)


def test_mismatch_sums_by_hand() -> None:
    sums = Mismatch(*mismatch(tensor([-1.0, -2.0]), tensor([-1.2, -1.5])).tolist())
    weights = (math.exp(0.2), math.exp(-0.5))
    assert sums.k1 == pytest.approx(0.3, abs=1e-12)
    assert sums.k3 == pytest.approx(weights[0] - 1.2 + weights[1] - 0.5, abs=1e-12)
    assert sums.max_abs_dlogp == pytest.approx(0.5, abs=1e-12)
    assert (sums.weight, sums.weight_squared) == (
        pytest.approx(sum(weights), abs=1e-12),
        pytest.approx(sum(w * w for w in weights), abs=1e-12),
    )


def test_effective_sample_share_by_hand() -> None:
    assert effective_sample_share(4, 4.0, 4.0) == 1.0
    assert effective_sample_share(4, 1.0, 1.0) == 0.25  # one token holds all the weight
    assert effective_sample_share(0, 0.0, 0.0) == 1.0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_in_the_reward_is_the_old_policys(estimator: str) -> None:
    """It lowers the advantage by coeff times the old policy's KL; it has no gradient of its own."""
    new, old, reference = (tensor([[x, x - 1]]) for x in (-0.9, -1.0, -1.4))
    mask, counts = torch.ones(1, 2, dtype=torch.bool), Denominators(2, 1, 1, 2)
    kl = {"k1": 0.4, "k2": 0.08, "k3": math.exp(-0.4) - 1 + 0.4}[estimator]
    logprobs = new.requires_grad_()
    inputs = LossInputs(logprobs, old, old, tensor([[2.0]]), mask, counts, LOW, HIGH)
    config = AlgorithmConfig(kl_placement="reward", kl_estimator=estimator, kl_coeff=0.5)
    result = objective(config, inputs, reference)
    result.total.backward()
    expected = -math.exp(0.1) * (2.0 - 0.5 * kl)
    assert result.total.item() == pytest.approx(expected, rel=1e-6)
    assert logprobs.grad[0].tolist() == pytest.approx([expected / 2] * 2, rel=1e-6)
    assert result.kl_loss.item() == 0


def test_gspo_with_per_token_advantages_is_gspo_token() -> None:
    """GSPO, eq. 14: the ratio has the sequence's value, normalised by its two loss tokens, and the
    token's gradient."""
    logprobs, old = tensor([[-0.95, -0.75, -5.0]]).requires_grad_(), tensor([[-1.0, -1.0, -1.0]])
    mask = torch.tensor([[True, True, False]])
    terms = policy_terms("gspo", logprobs, old, tensor([[1.0, -2.0, 1.0]]), mask)
    terms.terms[0, :2].sum().backward()
    s = math.exp((0.05 + 0.25) / 2)
    assert terms.ratio[0, :2].tolist() == pytest.approx([s, s], abs=1e-9)
    assert terms.terms[0, :2].tolist() == pytest.approx([-s, 2 * s], abs=1e-9)
    assert logprobs.grad[0].tolist() == pytest.approx([-s, 2 * s, 0.0], abs=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_infinite_log_probs_of_masked_tokens_do_not_matter(loss: str) -> None:
    mask = torch.tensor([[True, False]])
    old = tensor([[-1.0, float("-inf")]])
    logprobs = tensor([[-1.0, float("-inf")]]).requires_grad_()
    config = AlgorithmConfig(loss=loss, importance_correction="sequence")
    count = Denominators(1, 1, 1, 1)
    visible = logprobs.masked_fill(~mask, 0.0)
    inputs = LossInputs(
        visible, old, old, tensor([[2.0]]), mask, count, config.clip_low, config.clip_high
    )
    total = objective(config, inputs, None).total
    total.backward()
    assert math.isfinite(total.item())
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[0, 0].item() == pytest.approx(-2.0)


def test_each_loss_is_divided_by_its_own_count() -> None:
    counts = Denominators(
        num_tokens=8, num_sequences=4, num_completions=6, max_completion_tokens=10
    )
    divisors = {name: divisor(loss_named(name), counts) for name in LOSSES}
    assert divisors == {"dapo": 8, "cispo": 8, "grpo": 4, "gspo": 4, "dr_grpo": 6}


@pytest.mark.parametrize(
    ("returned", "part"),
    [
        (None, "returns None (NoneType); expected rl.api.loss.LossTerms"),
        (LossTerms(*[torch.zeros(1, 3)] * 3, torch.zeros(1, 2)), "clipped is of shape (1, 2)"),
        (LossTerms(*[torch.zeros(1, 3)] * 3, None), "clipped is None (NoneType)"),
    ],
)
def test_what_a_loss_may_not_return_is_a_sentence(monkeypatch, returned, part: str) -> None:
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(loss=lambda x: returned))
    zeros, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    x = LossInputs(zeros, zeros, zeros, zeros[:, :1], mask, Denominators(1, 1, 1, 1), LOW, HIGH)
    with pytest.raises(TypeError) as error:
        objective(AlgorithmConfig(loss="mine.loss"), x, None)
    text = sentence(error.value)
    assert text is not None and holds(text, f"algorithm.loss: mine.loss {part}")
