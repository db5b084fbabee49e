"""The whole objective of a micro-batch: policy loss + KL penalty, importance-weighted.

Axes: `_B` completions, `_C` completion tokens, right-padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl.algorithm.importance import importance_weights
from rl.algorithm.kl import kl_per_token
from rl.algorithm.losses import loss_named
from rl.api.loss import Denominators, LossInputs, LossTerms
from rl.config.schema import AlgorithmConfig


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
        """Scalar: what the backward starts from."""
        return self.policy_loss + self.kl_loss


def objective(
    config: AlgorithmConfig,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    denominators: Denominators,
) -> Objective:
    """sum_t weight_t * (importance_t * policy_term_t + kl_coeff * kl_t).

    Args:
        logprobs: [B, C] float32, nats, with gradient, 0 where the mask is False.
        old_logprobs: [B, C] float32, nats, the trainer's, before the iteration's first update.
        sampler_logprobs: [B, C] float32, nats.
        reference_logprobs: [B, C] float32, nats, 0 where the mask is False; None: no KL.
        advantages: [B, 1] float32.
        mask: [B, C] bool, tokens that carry loss.
        denominators: of the whole step, over all ranks.
    """
    advantages = advantages.expand_as(logprobs)
    kl = None
    if reference_logprobs is not None and config.kl_placement == "reward":
        old_kl = kl_per_token(old_logprobs, reference_logprobs, config.kl_estimator)
        # Of the OLD policy, detached (arXiv 2510.01555: k1 here = k2 as a loss).
        advantages = (advantages - config.kl_coeff * old_kl).detach()
    elif reference_logprobs is not None:
        kl = kl_per_token(logprobs, reference_logprobs, config.kl_estimator)
    importance = importance_weights(
        old_logprobs, sampler_logprobs, mask, config.importance_correction, config.importance_cap
    )
    policy = loss_named(config.loss)(
        LossInputs(
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            sampler_logprobs=sampler_logprobs,
            advantages=advantages,
            mask=mask,
            denominators=denominators,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
        )
    )
    if not isinstance(policy, LossTerms):
        raise TypeError(f"algorithm.loss: {config.loss} returns {policy!r}, no LossTerms")
    kl_loss = logprobs.new_zeros(())
    if kl is not None:
        kl_loss = config.kl_coeff * (policy.weights * kl).sum()
    policy_loss = (policy.weights * importance * policy.terms).sum()
    return Objective(policy_loss, kl_loss, policy, importance)
