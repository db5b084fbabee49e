"""The policy-gradient losses: one term per token, and the weight each token gets.

What: `policy_terms` (what a token's loss is) and `token_weights` (what it is divided by). The loss
of a micro-batch is sum(weights * (importance * terms + kl_coeff * kl)). Every denominator is an
ARGUMENT and counts the whole update over all ranks and micro-batches, so that the gradient does not
depend on how the batch is split; gradients are then summed, never averaged. What not: log-probs
(policies), importance and KL (their own files), the backward (learner).

Axes: `_B` completions in the micro-batch, `_C` completion tokens, right-padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

LossName = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"]


@dataclass(frozen=True)
class Denominators:
    """What one optimiser step is normalised by, over all ranks and micro-batches."""

    num_tokens: float
    """Tokens that carry loss."""
    num_sequences: float
    """Completions with at least one such token."""
    num_completions: float
    """Completions the step was planned with, dropped and masked ones included (a constant)."""
    max_completion_tokens: int
    """The sampling limit (a constant)."""


@dataclass(frozen=True)
class PolicyTerms:
    """Per-token pieces, all [B, C] float32."""

    terms: torch.Tensor
    """Loss term (to be minimised), with gradient; undefined where the mask is False."""
    ratio: torch.Tensor
    """pi_new / pi_old as the loss uses it (sequence-level for gspo), detached."""
    clipped: torch.Tensor
    """Bool: the clip is active, the token gives no gradient (cispo: its weight was cut)."""


def divisor(loss: LossName, denominators: Denominators) -> float:
    """The one number of the whole step that its token weights are divided by."""
    if loss == "dr_grpo":
        return denominators.num_completions * denominators.max_completion_tokens
    return denominators.num_sequences if loss == "gspo" else denominators.num_tokens


def token_weights(loss: LossName, mask: torch.Tensor, denominators: Denominators) -> torch.Tensor:
    """What each token's term is multiplied by, [B, C] float32; 0 where the mask is False.

        grpo, dapo, cispo: 1 / num_tokens                                  (DAPO's token mean)
        dr_grpo:           1 / (num_completions * max_completion_tokens)   (Dr. GRPO's constant)
        gspo:              1 / (num_sequences * |o_i|)                     (mean over completions)

    `|o_i|` counts the completion's own loss tokens. A KL penalty in the loss gets the same weights.
    DAPO: Yu et al. 2025, arXiv 2503.14476, eq. 8. Dr. GRPO: arXiv 2503.20783, listing 1.
    """
    mask = mask.float()
    if loss == "gspo":
        mask = mask / mask.sum(-1, keepdim=True).clamp(min=1.0)
    return mask / divisor(loss, denominators)


def policy_terms(
    loss: LossName,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyTerms:
    """Each token's loss term; r = pi_new / pi_old.

        grpo, dapo, dr_grpo: -min(r A, clip(r, 1 - low, 1 + high) A)       per token
        gspo:  the same with s = exp(mean_t log r_t), one per completion
        cispo: -sg(clip(r, 1 - low, 1 + high)) A log pi_new

    GRPO: arXiv 2402.03300, eq. 3; DAPO's clip-higher: arXiv 2503.14476, eq. 10; CISPO: MiniMax-M1,
    arXiv 2506.13585, eq. 4. GSPO: Zheng et al. 2025, arXiv 2507.18071; written in its token form
    (eq. 14), s_t = sg(s) pi_t / sg(pi_t), equal in value and gradient and open to per-token A.

    Args:
        logprobs: [B, C] float32, nats, with gradient.
        old_logprobs: [B, C] float32, nats, before the iteration's first update.
        advantages: [B, C] float32 (a KL in the reward makes them differ by token).
        mask: [B, C] bool, tokens that carry loss; others may hold anything, infinities included.
        clip_low, clip_high: distances from 1.
    """
    log_ratio = (logprobs - old_logprobs.detach()).masked_fill(~mask, 0.0)
    advantages = advantages.detach()
    if loss == "gspo":
        num_tokens = mask.sum(-1, keepdim=True).clamp(min=1)
        sequence = (log_ratio.sum(-1, keepdim=True) / num_tokens).detach()
        log_ratio = sequence + log_ratio - log_ratio.detach()
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    if loss == "cispo":
        masked_logprobs = logprobs.masked_fill(~mask, 0.0)
        terms = -bounded.detach() * advantages * masked_logprobs
        clipped = bounded != ratio
    else:
        terms = -torch.minimum(ratio * advantages, bounded * advantages)
        clipped = bounded * advantages < ratio * advantages
    return PolicyTerms(terms, ratio.detach(), (clipped & mask).detach())


def advantages_with_kl(advantages: torch.Tensor, kl: torch.Tensor, kl_coeff: float) -> torch.Tensor:
    """KL in the reward: A_t - kl_coeff * kl_t, detached (arXiv 2510.01555: k1 here = k2 as a loss).

    Args: advantages [B, 1] or [B, C]; kl [B, C] nats, of the OLD policy against the reference.
    """
    return (advantages - kl_coeff * kl).detach()
