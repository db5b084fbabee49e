"""Losses, KL and importance weights: hand-computed cases, and a float64 reference in plain loops.

The reference shares no code with `rl/algorithm`: python floats, one token at a time, and its
gradients are central differences of the loss with every stopped quantity held fixed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rl.algorithm.grpo import (
    effective_sample_share,
    importance_weights,
    kl_per_token,
    loss_named,
    mismatch,
    objective,
)
from rl.api.loss import Denominators, LossInputs, LossTerms, divisor
from rl.config.schema import AlgorithmConfig

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
    of: Denominators | None = None,
) -> LossTerms:
    of = of or Denominators(1, 1, 1, 1)
    return loss_named(loss)(LossInputs(logprobs, old, old, advantages, mask, of, LOW, HIGH))


def token_weights(loss: str, mask: torch.Tensor, of: Denominators) -> torch.Tensor:
    zeros = torch.zeros(mask.shape)
    return policy_terms(loss, zeros, zeros, zeros, mask, of).weights


# --- by hand ----------------------------------------------------------------------------------


def one_token(loss: str, ratio: float, advantage: float) -> tuple[float, float, bool]:
    """(term, d term / d logprob, clipped) of a single token whose old log-prob is -1."""
    logprob = tensor([[-1.0 + math.log(ratio)]]).requires_grad_()
    mask = torch.ones(1, 1, dtype=torch.bool)
    old = tensor([[-1.0]])
    terms = policy_terms(loss, logprob, old, tensor([[advantage]]), mask)
    terms.terms.sum().backward()
    return terms.terms.item(), logprob.grad.item(), bool(terms.clipped.item())


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


def test_gspo_uses_the_length_normalised_sequence_ratio() -> None:
    # log-ratios 0.1 and 0.3 on the two loss tokens: s = exp(0.2) = 1.2214 for both
    logprobs, old = tensor([[-0.9, -0.7, -5.0]]), tensor([[-1.0, -1.0, -1.0]])
    mask = torch.tensor([[True, True, False]])
    terms = policy_terms("gspo", logprobs, old, tensor([[1.0, 1.0, 1.0]]), mask)
    assert terms.ratio[0, :2].tolist() == pytest.approx([math.exp(0.2)] * 2, abs=1e-6)


def test_token_weights_by_hand() -> None:
    mask = torch.tensor([[True, True, True, False], [True, False, False, False], [False] * 4])
    of = Denominators(num_tokens=8, num_sequences=4, num_completions=6, max_completion_tokens=10)
    rows = {name: token_weights(name, mask, of).tolist() for name in LOSSES}
    eighth, sixtieth = [1 / 8] * 3 + [0.0], [1 / 60] * 3 + [0.0]
    for name in ("dapo", "cispo"):
        assert rows[name][0] == pytest.approx(eighth)
        assert rows[name][1] == pytest.approx([1 / 8, 0, 0, 0])
    assert rows["dr_grpo"][0] == pytest.approx(sixtieth)
    for name in ("grpo", "gspo"):
        assert rows[name][0] == pytest.approx([1 / 12] * 3 + [0.0])  # 4 sequences x 3 tokens
        assert rows[name][1] == pytest.approx([1 / 4, 0, 0, 0])
    assert all(rows[name][2] == [0.0] * 4 for name in LOSSES)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", math.exp(-0.5) - 1 + 0.5, 1 - math.exp(-0.5)),
    ],
)
def test_kl_estimators_by_hand(estimator: str, value: float, gradient: float) -> None:
    logprob = tensor([[-1.0]]).requires_grad_()
    kl = kl_per_token(logprob, tensor([[-1.5]]), estimator)
    kl.sum().backward()
    assert kl.item() == pytest.approx(value, abs=1e-12)
    assert logprob.grad.item() == pytest.approx(gradient, abs=1e-12)


def test_k1_and_k3_are_unbiased_and_k2_nearly() -> None:
    policy, reference = (
        torch.tensor([0.5, 0.3, 0.2]).double(),
        torch.tensor([0.4, 0.4, 0.2]).double(),
    )
    exact = (policy * (policy / reference).log()).sum().item()
    for estimator, tolerance in (("k1", 1e-12), ("k3", 1e-12), ("k2", 2e-3)):
        tokens = kl_per_token(policy.log()[None], reference.log()[None], estimator)[0]
        assert (policy * tokens).sum().item() == pytest.approx(exact, abs=tolerance)


def test_k1_in_the_loss_pulls_nowhere_and_k2_and_k3_do() -> None:
    """Over all tokens the policy could draw: why the config refuses k1 in the loss."""
    reference = torch.tensor([0.4, 0.4, 0.2]).double().log()
    for estimator, expected in (("k1", False), ("k2", True), ("k3", True)):
        logits = torch.tensor([0.5, 0.3, 0.2]).double().log().requires_grad_()
        logprobs = logits.log_softmax(-1)
        tokens = kl_per_token(logprobs[None], reference[None], estimator)[0]
        (logprobs.exp().detach() * tokens).sum().backward()
        assert bool(logits.grad.abs().max() > 1e-3) is expected, estimator
        assert expected or logits.grad.abs().max() < 1e-12


def test_k3_keeps_its_digits_near_zero() -> None:
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
    old, sampler = tensor([[-1.0, -1.0, -9.0]]), tensor([[-1.5, -2.0, -1.0]])
    mask = torch.tensor([[True, True, False]])
    weights = importance_weights(old, sampler, mask, correction, cap)
    assert weights[0].tolist() == pytest.approx(expected, abs=1e-12)


def test_mismatch_sums_by_hand() -> None:
    old, sampler = tensor([[-1.0, -2.0, -7.0]]), tensor([[-1.2, -1.5, -1.0]])
    sums = mismatch(old, sampler, torch.tensor([[True, True, False]]))
    weights = (math.exp(0.2), math.exp(-0.5))
    assert sums.num_tokens == 2
    assert sums.k1 == pytest.approx(0.3, abs=1e-12)
    assert sums.k3 == pytest.approx(weights[0] - 1.2 + weights[1] - 0.5, abs=1e-12)
    assert sums.max_abs_dlogp == pytest.approx(0.5, abs=1e-12)
    assert (sums.weight, sums.weight_squared) == (
        pytest.approx(sum(weights), abs=1e-12),
        pytest.approx(sum(w * w for w in weights), abs=1e-12),
    )


def test_effective_sample_share() -> None:
    assert effective_sample_share(4, 4.0, 4.0) == 1.0
    assert effective_sample_share(4, 1.0, 1.0) == 0.25  # one token holds all the weight
    assert effective_sample_share(0, 0.0, 0.0) == 1.0


# --- an independent reference -----------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A ragged batch as plain lists: one list of tokens per completion."""

    logprobs: list[list[float]]
    old: list[list[float]]
    sampler: list[list[float]]
    reference: list[list[float]]
    mask: list[list[bool]]
    advantages: list[float]
    denominators: Denominators


def make_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    lengths = [5, 1, 7, 3]

    def rows(scale: float) -> list[list[float]]:
        return [list(-2 + scale * rng.standard_normal(n)) for n in lengths]

    mask = [[bool(rng.random() < 0.75) for _ in range(n)] for n in lengths]
    mask[1] = [False]
    count = Denominators(
        num_tokens=sum(map(sum, mask)) + 11,  # more tokens live in other micro-batches
        num_sequences=9,
        num_completions=12,
        max_completion_tokens=16,
    )
    advantages = list(rng.standard_normal(len(lengths)))
    return Case(rows(0.4), rows(0.4), rows(0.4), rows(0.4), mask, advantages, count)


def reference_loss(case: Case, config: AlgorithmConfig, logprobs: list[list[float]]) -> float:
    """The objective, written out; `case.logprobs` is where stopped gradients are frozen."""
    total = 0.0
    for i, now in enumerate(logprobs):
        tokens = [t for t, keep in enumerate(case.mask[i]) if keep]
        if not tokens:
            continue
        frozen, old, sampler, ref = (
            case.logprobs[i], case.old[i], case.sampler[i], case.reference[i],
        )  # fmt: skip
        sequence_weight = 1.0
        for t in tokens:
            sequence_weight *= math.exp(old[t]) / math.exp(sampler[t])
        sequence_ratio = frozen_ratio = 1.0
        for t in tokens:
            sequence_ratio *= (math.exp(now[t]) / math.exp(old[t])) ** (1 / len(tokens))
            frozen_ratio *= (math.exp(frozen[t]) / math.exp(old[t])) ** (1 / len(tokens))
        row = 0.0
        for t in tokens:
            advantage = case.advantages[i]
            if config.kl_placement == "reward":
                advantage -= config.kl_coeff * reference_kl(old[t], ref[t], config.kl_estimator)
            weight = {
                "none": 1.0,
                "token": min(math.exp(old[t]) / math.exp(sampler[t]), config.importance_cap),
                "sequence": min(sequence_weight, config.importance_cap),
            }[config.importance_correction]
            lowest, highest = 1 - config.clip_low, 1 + config.clip_high
            ratio = math.exp(now[t] - old[t])
            if config.loss == "gspo":
                ratio = sequence_ratio
                if config.importance_correction == "token" or config.kl_placement == "reward":
                    # Tokens that count differently: GSPO's token form (eq. 14) is the definition.
                    ratio = frozen_ratio * math.exp(now[t] - frozen[t])
            if config.loss == "cispo":
                stopped = math.exp(frozen[t] - old[t])
                gain = min(stopped, highest) * advantage * now[t]
            else:
                gain = min(ratio * advantage, min(max(ratio, lowest), highest) * advantage)
            row -= weight * gain
            if config.kl_placement == "loss":
                row += config.kl_coeff * reference_kl(now[t], ref[t], config.kl_estimator)
        count = case.denominators
        if config.loss == "dr_grpo":
            total += row / (count.num_completions * count.max_completion_tokens)
        elif config.loss in ("grpo", "gspo"):
            total += row / len(tokens) / count.num_sequences
        else:
            total += row / count.num_tokens
    return total


def reference_kl(now: float, ref: float, estimator: str) -> float:
    ratio = math.exp(ref) / math.exp(now)
    if estimator == "k1":
        return -math.log(ratio)
    return math.log(ratio) ** 2 / 2 if estimator == "k2" else ratio - 1 - math.log(ratio)


def difference_quotients(
    loss: Callable[[list[list[float]]], float], at: list[list[float]], h: float = 1e-6
) -> list[list[float]]:
    gradient = [[0.0] * len(row) for row in at]
    for i, row in enumerate(at):
        for t in range(len(row)):
            up, down = ([list(r) for r in at] for _ in range(2))
            up[i][t] += h
            down[i][t] -= h
            gradient[i][t] = (loss(up) - loss(down)) / (2 * h)
    return gradient


def padded(rows: list[list[float]]) -> torch.Tensor:
    width = max(map(len, rows))
    return tensor([list(row) + [0.0] * (width - len(row)) for row in rows])


def our_loss(case: Case, config: AlgorithmConfig) -> tuple[float, torch.Tensor]:
    mask = padded([[float(m) for m in row] for row in case.mask]).bool()
    logprobs = padded(case.logprobs).requires_grad_()
    visible = logprobs.masked_fill(~mask, 0.0)
    inputs = LossInputs(
        visible,
        padded(case.old),
        padded(case.sampler),
        tensor([[a] for a in case.advantages]),
        mask,
        case.denominators,
        config.clip_low,
        config.clip_high,
    )
    reference = padded(case.reference).masked_fill(~mask, 0.0) if config.kl_coeff else None
    result = objective(config, inputs, reference)
    result.total.backward()
    return result.total.item(), logprobs.grad


@pytest.mark.parametrize("correction", ["none", "token", "sequence"])
@pytest.mark.parametrize(
    ("estimator", "placement", "coeff"),
    [("k3", "loss", 0.0), ("k1", "loss", 0.3), ("k2", "loss", 0.3), ("k3", "loss", 0.3),
     ("k1", "reward", 0.3), ("k3", "reward", 0.3)],
)  # fmt: skip
@pytest.mark.parametrize("loss", LOSSES)
def test_objective_equals_the_reference_in_value_and_gradient(
    loss: str, estimator: str, placement: str, coeff: float, correction: str
) -> None:
    config = AlgorithmConfig(
        loss=loss,
        clip_low=LOW,
        clip_high=HIGH,
        kl_estimator=estimator,
        kl_placement=placement,
        kl_coeff=coeff,
        importance_correction=correction,
    )
    for seed in range(3):
        case = make_case(seed)
        value, gradient = our_loss(case, config)
        assert value == pytest.approx(
            reference_loss(case, config, case.logprobs), rel=1e-6, abs=1e-8
        )
        expected = difference_quotients(
            lambda at, case=case: reference_loss(case, config, at), case.logprobs
        )
        for i, row in enumerate(expected):
            assert gradient[i, : len(row)].tolist() == pytest.approx(row, rel=1e-5, abs=1e-8)
            assert gradient[i, len(row) :].abs().sum() == 0


def test_gspo_with_per_token_advantages_is_its_token_form() -> None:
    # Eq. 14: the ratio's value is the sequence's, its gradient the token's own.
    logprobs, old = tensor([[-0.95, -0.75]]).requires_grad_(), tensor([[-1.0, -1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    terms = policy_terms("gspo", logprobs, old, tensor([[1.0, -2.0]]), mask)
    terms.terms.sum().backward()
    s = math.exp((0.05 + 0.25) / 2)
    assert terms.terms[0].tolist() == pytest.approx([-s, 2 * s], abs=1e-9)
    assert logprobs.grad[0].tolist() == pytest.approx([-s, 2 * s], abs=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_unusable_numbers_under_the_mask_do_no_harm(loss: str) -> None:
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


@pytest.mark.parametrize("loss", LOSSES)
def test_shares_of_micro_batches_add_up(loss: str) -> None:
    config = AlgorithmConfig(loss=loss, kl_coeff=0.1, importance_correction="sequence")
    case = make_case(7)
    whole, gradient = our_loss(case, config)
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        part = Case(
            case.logprobs[rows], case.old[rows], case.sampler[rows], case.reference[rows],
            case.mask[rows], case.advantages[rows], case.denominators,
        )  # fmt: skip
        parts.append(our_loss(part, config))
    assert sum(value for value, _ in parts) == pytest.approx(whole, rel=1e-9)
    width = parts[0][1].shape[1]
    assert torch.allclose(parts[0][1], gradient[:1, :width], rtol=1e-9)
    assert torch.allclose(parts[1][1], gradient[1:], rtol=1e-9)


def a_strangers_grpo(x: LossInputs) -> LossTerms:
    """As one would write it from the paper."""
    ratio = (x.logprobs - x.old_logprobs).masked_fill(~x.mask, 0.0).exp()
    bounded = ratio.clamp(1.0 - x.clip_low, 1.0 + x.clip_high)
    terms = -torch.minimum(ratio * x.advantages, bounded * x.advantages)
    weights = x.mask.float() / x.denominators.num_tokens
    return LossTerms(terms, weights, ratio.detach(), terms > -ratio * x.advantages)


@pytest.mark.parametrize("coeff", [0.0, 0.3])
def test_a_strangers_loss_is_reached_by_its_path_and_equals_ours(coeff: float) -> None:
    ours = AlgorithmConfig(clip_low=LOW, clip_high=HIGH, kl_coeff=coeff)
    path = f"{a_strangers_grpo.__module__}.a_strangers_grpo"
    theirs = AlgorithmConfig(loss=path, clip_low=LOW, clip_high=HIGH, kl_coeff=coeff)
    for seed in range(5):
        case = make_case(seed)
        (value, gradient), (other, other_gradient) = our_loss(case, ours), our_loss(case, theirs)
        assert value == pytest.approx(other, rel=1e-9)
        assert torch.allclose(gradient, other_gradient, rtol=1e-9)


def test_which_count_a_loss_is_divided_by() -> None:
    of = Denominators(num_tokens=8, num_sequences=4, num_completions=6, max_completion_tokens=10)
    found = {name: divisor(loss_named(name), of) for name in LOSSES}
    assert found == {"dapo": 8, "cispo": 8, "grpo": 4, "gspo": 4, "dr_grpo": 6}
    assert divisor(a_strangers_grpo, of) == 8
