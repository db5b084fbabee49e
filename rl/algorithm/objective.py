"""The whole objective of a micro-batch: policy loss + KL penalty, importance-weighted.

Axes: `_B` completions, `_C` completion tokens, right-padded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rl.algorithm.importance import importance_weights
from rl.algorithm.kl import kl_per_token
from rl.algorithm.losses import loss_named
from rl.api.loss import LossInputs, LossTerms
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
        # Of the OLD policy, detached (arXiv 2510.01555: k1 here = k2 as a loss).
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
    if not isinstance(policy, LossTerms):
        raise TypeError(f"algorithm.loss: {config.loss} returns {policy!r}, no LossTerms")
    kl_loss = x.logprobs.new_zeros(())
    if kl is not None:
        kl_loss = config.kl_coeff * (policy.weights * kl).sum()
    policy_loss = (policy.weights * importance * policy.terms).sum()
    return Objective(policy_loss, kl_loss, policy, importance)
