"""GRPO's arithmetic: rewards -> advantages, log-probs -> loss.

    A_g      = (r_g - mean(r)) / s                         over the completions g of a group
    policy_t = -min(ratio_t A, clip(ratio_t) A)            or another of the losses below
    loss     = sum_t weight_t (importance_t policy_t + kl_coeff kl_t)

Every denominator (in weight_t) counts the whole optimizer step over all ranks and micro-batches, so
the gradient does not depend on how the batch is split; gradients are summed, never averaged.

Axes: `_P` prompts (groups), `_G` completions of a group; `_B` completions of a micro-batch, `_C`
completion tokens, right-padded.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from rl.algorithm.metrics import SPREAD_TOLERANCE
from rl.api.loss import Loss, LossInputs, LossTerms, divided_by, terms_problem
from rl.config.schema import AlgorithmConfig

# Advantages: how much better each completion scored than its group.


@dataclass(frozen=True)
class RewardMoments:
    """Power sums of graded rewards; add them up over ranks for the whole batch's spread."""

    total: float
    """Sum of rewards."""
    total_of_squares: float
    """Sum of squared rewards."""
    count: float
    """Number of graded completions."""

    @property
    def std(self) -> float:
        """Population standard deviation; 0 for an empty batch."""
        if self.count == 0:
            return 0.0
        mean = self.total / self.count
        return math.sqrt(max(0.0, self.total_of_squares / self.count - mean * mean))


def reward_moments(rewards_PG: Sequence[Sequence[float | None]]) -> RewardMoments:
    """Power sums of this rank's graded rewards (None is skipped)."""
    graded = [reward for rewards_G in rewards_PG for reward in rewards_G if reward is not None]
    return RewardMoments(math.fsum(graded), math.fsum(r * r for r in graded), len(graded))


def group_advantages(
    rewards_G: Sequence[float | None],
    scale: Literal["none", "group_std", "batch_std"],
    eps: float,
    batch: RewardMoments | None = None,
) -> list[float | None]:
    """[G] A = (r - mean(r)) / s, with s = 1 | std(r) + eps | std_batch(r) + eps.

    group_std: GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2); none: Dr. GRPO (Liu et al.
    2025, arXiv 2503.20783); batch_std: group mean, batch deviation (LitePPO, Liu et al. 2025,
    arXiv 2508.08221). Standard deviations are population ones over graded members. In a group with
    fewer than two graded members, or with equal rewards, every advantage is 0.

    Args:
        rewards_G: in [0, 1]; None = ungraded: left out of mean and deviation, advantage None.
        eps: added to the standard deviation, reward units.
        batch: for batch_std, `reward_moments` summed over ALL ranks.
    """
    graded = [reward for reward in rewards_G if reward is not None]
    if len(graded) < 2 or max(graded) - min(graded) <= SPREAD_TOLERANCE:
        return [None if reward is None else 0.0 for reward in rewards_G]
    mean = math.fsum(graded) / len(graded)
    divisor = 1.0
    if scale == "group_std":
        divisor = math.sqrt(math.fsum((r - mean) ** 2 for r in graded) / len(graded)) + eps
    elif scale == "batch_std":
        assert batch is not None, "batch_std needs the moments of the whole batch"
        divisor = batch.std + eps
    return [None if r is None else (r - mean) / divisor for r in rewards_G]


# The policy-gradient losses: `algorithm.loss` names one of these functions, or a user's.
# sg() stops the gradient.


MAX_LOG_RATIO = 80.0
"""nats; exp(88.8) is infinite in float32."""


@divided_by("num_sequences")
def grpo(x: LossInputs) -> LossTerms:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = pi_new / pi_old; mean over a completion's
    tokens, then over completions, so that a token of a long completion weighs less.

    GRPO: Shao et al. 2024, arXiv 2402.03300, eq. 3.
    """
    return _clipped(x, _log_ratio(x), _mean_of_means(x))


def dapo(x: LossInputs) -> LossTerms:
    """grpo, but every token of the step has the same weight, regardless of its completion.

    DAPO: Yu et al. 2025, arXiv 2503.14476, eq. 8, with clip_high 0.28 ("clip higher") and no KL.
    """
    return _clipped(x, _log_ratio(x), _mean_over_tokens(x))


@divided_by("num_completions")
def dr_grpo(x: LossInputs) -> LossTerms:
    """grpo, but each token is divided by a constant: planned completions x max_completion_tokens.

    Dr. GRPO: Liu et al. 2025, arXiv 2503.20783, listing 1. Use it with advantage_scale 'none'.
    """
    constant = x.denominators.num_completions * x.denominators.max_completion_tokens
    return _clipped(x, _log_ratio(x), x.mask.float() / constant)


@divided_by("num_sequences")
def gspo(x: LossInputs) -> LossTerms:
    """grpo with one ratio per completion, s = exp(mean_t log r_t).

    Zheng et al. 2025, arXiv 2507.18071, in its token form (eq. 14): s_t = sg(s) pi_t / sg(pi_t).
    It has the same value and gradient as the sequence form and allows a different A per token.
    """
    log_ratio = _log_ratio(x)
    num_tokens = x.mask.sum(-1, keepdim=True).clamp(min=1)
    sequence = (log_ratio.sum(-1, keepdim=True) / num_tokens).detach()
    return _clipped(x, sequence + log_ratio - log_ratio.detach(), _mean_of_means(x))


def cispo(x: LossInputs) -> LossTerms:
    """-sg(min(r, 1 + high)) A log pi_new, mean over the step's tokens; `clip_low` is not used.

    MiniMax-M1, arXiv 2506.13585, eq. 4 and 5, without a lower bound, as its authors ran it.
    """
    ratio = _log_ratio(x).exp()
    bounded = ratio.clamp(max=1.0 + x.clip_high)
    terms = -bounded.detach() * x.advantages.detach() * x.logprobs.masked_fill(~x.mask, 0.0)
    clipped = ((bounded != ratio) & x.mask).detach()
    return LossTerms(terms, _mean_over_tokens(x), ratio.detach(), clipped)


def loss_named(name: str) -> Loss:
    """The shipped loss of that name, or the function at that dotted path."""
    module, _, function = name.rpartition(".")
    loss: Loss = getattr(importlib.import_module(module or __name__), function)
    return loss


def _mean_over_tokens(x: LossInputs) -> torch.Tensor:
    """[B, C] float32: the same weight for every token of the step."""
    return x.mask.float() / x.denominators.num_tokens


def _mean_of_means(x: LossInputs) -> torch.Tensor:
    """[B, C] float32: the same weight for every completion, shared equally by its tokens."""
    mask = x.mask.float()
    return mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / x.denominators.num_sequences


def _log_ratio(x: LossInputs) -> torch.Tensor:
    """[B, C] float32, nats, with gradient; 0 where the mask is False."""
    return (x.logprobs - x.old_logprobs.detach()).masked_fill(~x.mask, 0.0)


def _clipped(x: LossInputs, log_ratio: torch.Tensor, weights: torch.Tensor) -> LossTerms:
    """PPO's pessimistic bound, token by token; `log_ratio`, `weights`: [B, C] float32."""
    advantages = x.advantages.detach()
    # An infinite ratio has a NaN gradient even where the bound is the smaller one (0 * inf).
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    bounded = ratio.clamp(1.0 - x.clip_low, 1.0 + x.clip_high)
    terms = -torch.minimum(ratio * advantages, bounded * advantages)
    clipped = bounded * advantages < ratio * advantages
    return LossTerms(terms, weights, ratio.detach(), (clipped & x.mask).detach())


# KL to the reference policy.


def kl_per_token(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """KL(policy || reference) by token, estimated from tokens drawn from the policy: Schulman 2020,
    joschu.net/blog/kl-approx.html; d = log pi - log pi_ref.

        k1 = d                   unbiased, any sign, high variance
        k2 = d^2 / 2             biased, >= 0; as a loss its gradient is that of KL, on-policy
        k3 = e^-d - 1 + d        unbiased, >= 0; as a loss its gradient is that of KL(ref || policy)

    As a LOSS, k1's expected gradient is zero on-policy (E[grad log pi] = 0): use k1 in the reward.
    See arXiv 2510.01555 for the gradient of each estimator, in the reward and as a loss.

    Args:
        logprobs: [B, C] float32, nats, with gradient when used in a loss.
        reference_logprobs: [B, C] float32, nats, no gradient.

    Returns: [B, C] float32, nats. The caller masks and sums.
    """
    d = logprobs - reference_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d * d
    return torch.expm1(-d) + d


# The inference engine ("sampler") and the trainer compute slightly different log-probs, as kernels,
# dtypes and batch shapes differ. Importance weights correct the difference, `Mismatch` measures it
# (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").


def importance_weights(
    old_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    mask: torch.Tensor,
    correction: Literal["none", "token", "sequence"],
    cap: float,
) -> torch.Tensor:
    """Truncated importance weight of every token (TIS; Ionides 2008, Yao et al. 2025).

        token:    w_t = min(pi_old(y_t) / pi_sampler(y_t), cap)
        sequence: w   = min(prod_t pi_old(y_t) / pi_sampler(y_t), cap), the same for all its tokens

    Args:
        old_logprobs: [B, C] float32, nats, from the trainer before the iteration's first update.
        sampler_logprobs: [B, C] float32, nats, from the sampler.
        mask: [B, C] bool, tokens that carry loss; the sequence product is over these only.
        cap: upper bound, >= 1.

    Returns: [B, C] float32, detached; 1 where the mask is False or correction is 'none'.
    """
    if correction == "none":
        return torch.ones_like(sampler_logprobs)
    log_weight = (old_logprobs.detach() - sampler_logprobs).masked_fill(~mask, 0.0)
    if correction == "sequence":
        log_weight = log_weight.sum(-1, keepdim=True)
    weight = log_weight.clamp(max=math.log(cap)).exp()
    return weight.expand_as(sampler_logprobs).masked_fill(~mask, 1.0)


class Mismatch(NamedTuple):
    """Sampler-trainer mismatch, summed over tokens; `d` = log pi_old - log pi_sampler, nats.

    For means: add up over micro-batches and ranks first, then divide by the number of tokens.
    """

    k1: float
    """Sum of -d: k1 estimate of KL(sampler || trainer); the sampler drew the tokens."""
    k3: float
    """Sum of e^d - 1 - d: k3 estimate of the same KL."""
    max_abs_dlogp: float
    """Largest |d|."""
    weight: float
    """Sum of the untruncated w = e^d."""
    weight_squared: float
    """Sum of w^2."""


def mismatch(old_logprobs_N: torch.Tensor, sampler_logprobs_N: torch.Tensor) -> torch.Tensor:
    """[5] float64, the numbers of a `Mismatch`, over the log-probs (nats) of N >= 1 tokens."""
    d = old_logprobs_N.detach().double() - sampler_logprobs_N.double()
    weight = d.exp()
    k3 = (torch.expm1(d) - d).sum()
    return torch.stack([-d.sum(), k3, d.abs().max(), weight.sum(), (weight * weight).sum()])


def effective_sample_share(num_tokens: float, weight: float, weight_squared: float) -> float:
    """Kish's effective sample size per token, (sum w)^2 / (n sum w^2), in (0, 1]; 1 if empty."""
    if num_tokens == 0 or weight_squared == 0:
        return 1.0
    return weight * weight / (num_tokens * weight_squared)


# The objective.


@dataclass(frozen=True)
class Objective:
    """A micro-batch's share of the step's loss; shares add up over micro-batches and ranks."""

    policy_loss: torch.Tensor
    """Scalar, with gradient."""
    kl_loss: torch.Tensor
    """Scalar, kl_coeff included; 0 without a reference or with the KL in the reward."""
    policy: LossTerms
    importance: torch.Tensor
    """[B, C] float32, the truncated weights that were used."""

    @property
    def total(self) -> torch.Tensor:
        """Scalar: the loss whose gradient the backward computes."""
        return self.policy_loss + self.kl_loss


def objective(
    config: AlgorithmConfig, x: LossInputs, reference_logprobs: torch.Tensor | None
) -> Objective:
    """sum_t weight_t * (importance_t * policy_term_t + kl_coeff * kl_t).

    Args:
        x: log-probs 0 where the mask is False; advantages [B, 1].
        reference_logprobs: [B, C] float32, nats, 0 where the mask is False; None: no KL.
    """
    advantages = x.advantages.expand_as(x.logprobs)
    kl = None
    if reference_logprobs is not None and config.kl_placement == "reward":
        old_kl = kl_per_token(x.old_logprobs, reference_logprobs, config.kl_estimator)
        # KL of the OLD policy, detached (arXiv 2510.01555: k1 here = k2 as a loss).
        advantages = (advantages - config.kl_coeff * old_kl).detach()
    elif reference_logprobs is not None:
        kl = kl_per_token(x.logprobs, reference_logprobs, config.kl_estimator)
    importance = importance_weights(
        x.old_logprobs,
        x.sampler_logprobs,
        x.mask,
        config.importance_correction,
        config.importance_cap,
    )
    policy = loss_named(config.loss)(replace(x, advantages=advantages))
    if problem := terms_problem(policy, x.logprobs.shape):
        raise TypeError(f"algorithm.loss: {config.loss} {problem}")
    kl_loss = x.logprobs.new_zeros(())
    if kl is not None:
        kl_loss = config.kl_coeff * (policy.weights * kl).sum()
    policy_loss = (policy.weights * importance * policy.terms).sum()
    return Objective(policy_loss, kl_loss, policy, importance)
