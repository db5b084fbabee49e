"""The sampler is not quite the trainer: measure by how much, and weigh it away.

Two engines give one model's tokens slightly different log-probs (kernels, dtypes, batch shapes), so
completions come from a policy a little beside the one that is trained (Yao et al. 2025, "Your
efficient RL framework secretly brings you off-policy RL training").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

ImportanceCorrection = Literal["none", "token", "sequence"]


def importance_weights(
    old_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    mask: torch.Tensor,
    correction: ImportanceCorrection,
    cap: float,
) -> torch.Tensor:
    """Truncated importance weight of every token (TIS; Ionides 2008, Yao et al. 2025).

        token:    w_t = min(pi_old(y_t) / pi_sampler(y_t), cap)
        sequence: w   = min(prod_t pi_old(y_t) / pi_sampler(y_t), cap), the same for all its tokens

    Args:
        old_logprobs: [B, C] float32, nats, the trainer's, before the iteration's first update.
        sampler_logprobs: [B, C] float32, nats, the sampler's own.
        mask: [B, C] bool, tokens that carry loss; only they enter a product.
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


@dataclass(frozen=True)
class Mismatch:
    """Sums over tokens of sampler-against-trainer numbers; `d` = log pi_old - log pi_sampler, nats.

    Divide by `num_tokens`, or add the sums of several micro-batches and ranks up first.
    """

    num_tokens: float
    k1: float
    """Sum of -d: k1 estimate of KL(sampler || trainer), tokens being the sampler's."""
    k3: float
    """Sum of e^d - 1 - d: k3 estimate of the same."""
    max_abs_dlogp: float
    """Largest |d|."""
    weight: float
    """Sum of the untruncated w = e^d."""
    weight_squared: float
    """Sum of w^2."""


def mismatch(
    old_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, mask: torch.Tensor
) -> Mismatch:
    """Sums over the masked tokens of [B, C] log-probs (nats); computed in float64."""
    d = (old_logprobs.detach().double() - sampler_logprobs.double())[mask]
    if d.numel() == 0:
        return Mismatch(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    weight = d.exp()
    k3 = (torch.expm1(d) - d).sum()
    numbers = torch.stack([-d.sum(), k3, d.abs().max(), weight.sum(), (weight * weight).sum()])
    return Mismatch(d.numel(), *numbers.tolist())


def effective_sample_share(num_tokens: float, weight: float, weight_squared: float) -> float:
    """(sum w)^2 / (n sum w^2), in (0, 1]: the share of tokens a weighted mean is worth (Kish).

    1 for an empty batch: nothing was lost.
    """
    if num_tokens == 0 or weight_squared == 0:
        return 1.0
    return weight * weight / (num_tokens * weight_squared)
