"""Per-token estimators of KL(policy || reference): k1, k2, k3 of Schulman 2020 ("Approximating KL
divergence", joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from typing import Literal

import torch

KLEstimator = Literal["k1", "k2", "k3"]


def kl_per_token(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: KLEstimator
) -> torch.Tensor:
    """One estimate per token, from tokens drawn from the policy; d = log pi - log pi_ref.

        k1 = d                   unbiased, any sign, high variance
        k2 = d^2 / 2             biased, >= 0; as a loss its gradient is that of KL, on-policy
        k3 = e^-d - 1 + d        unbiased, >= 0; as a loss its gradient is that of KL(ref || policy)

    As a LOSS, k1's expected gradient is zero on-policy (E[grad log pi] = 0): use k1 in the reward.
    See arXiv 2510.01555 for which value makes which gradient.

    Args:
        logprobs: [B, C] float32, nats, with gradient when used in a loss.
        reference_logprobs: [B, C] float32, nats, no gradient.

    Returns: [B, C] float32, nats. Masking and summing are the caller's.
    """
    d = logprobs - reference_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d * d
    return torch.expm1(-d) + d
