"""The shipped policy-gradient losses: `algorithm.loss` names one of these functions.

Each gives a term per token, and the weight the token gets. Every denominator counts the whole
update over all ranks and micro-batches, so that the gradient does not depend on how the batch is
split; gradients are then summed, never averaged.

Axes: `_B` completions in the micro-batch, `_C` completion tokens, right-padded.
"""

from __future__ import annotations

import importlib

import torch

from rl.api.loss import Loss, LossInputs, LossTerms, divided_by


def loss_named(name: str) -> Loss:
    """The shipped loss of that name, or the function at that dotted path."""
    module, _, function = name.rpartition(".")
    found: Loss = getattr(importlib.import_module(module or __name__), function)
    return found


@divided_by("num_sequences")
def grpo(x: LossInputs) -> LossTerms:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = pi_new / pi_old; mean over a completion's own
    tokens, then over completions, so that a token of a long one weighs less.

    DeepSeekMath: Shao et al. 2024, arXiv 2402.03300, eq. 3.
    """
    return _clipped(x, _log_ratio(x), _mean_of_means(x))


def dapo(x: LossInputs) -> LossTerms:
    """The same, every token of the step weighing alike, whichever completion it is of.

    Yu et al. 2025, arXiv 2503.14476, eq. 8; theirs has clip_high 0.28 ("clip higher") and no KL.
    """
    return _clipped(x, _log_ratio(x), _mean_over_tokens(x))


@divided_by("num_completions")
def dr_grpo(x: LossInputs) -> LossTerms:
    """The same over a constant, completions x longest completion: Liu et al. 2025, arXiv
    2503.20783, listing 1. It wants advantage_scale 'none'."""
    of = x.denominators
    return _clipped(
        x, _log_ratio(x), x.mask.float() / (of.num_completions * of.max_completion_tokens)
    )


@divided_by("num_sequences")
def gspo(x: LossInputs) -> LossTerms:
    """'grpo' with one ratio per completion, s = exp(mean_t log r_t).

    Zheng et al. 2025, arXiv 2507.18071; written in its token form (eq. 14), s_t = sg(s) pi_t /
    sg(pi_t), equal in value and gradient and open to per-token A.
    """
    log_ratio = _log_ratio(x)
    num_tokens = x.mask.sum(-1, keepdim=True).clamp(min=1)
    sequence = (log_ratio.sum(-1, keepdim=True) / num_tokens).detach()
    return _clipped(x, sequence + log_ratio - log_ratio.detach(), _mean_of_means(x))


def cispo(x: LossInputs) -> LossTerms:
    """-sg(min(r, 1 + high)) A log pi_new, mean over the step's tokens; `clip_low` plays no part.

    MiniMax-M1, arXiv 2506.13585, eq. 4 and 5, without a lower bound, as its authors ran it.
    """
    ratio = _log_ratio(x).exp()
    bounded = ratio.clamp(max=1.0 + x.clip_high)
    terms = -bounded.detach() * x.advantages.detach() * x.logprobs.masked_fill(~x.mask, 0.0)
    clipped = ((bounded != ratio) & x.mask).detach()
    return LossTerms(terms, _mean_over_tokens(x), ratio.detach(), clipped)


def _mean_over_tokens(x: LossInputs) -> torch.Tensor:
    """[B, C] float32: every token of the step alike."""
    return x.mask.float() / x.denominators.num_tokens


def _mean_of_means(x: LossInputs) -> torch.Tensor:
    """[B, C] float32: every completion of the step alike, and every token within one."""
    mask = x.mask.float()
    return mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / x.denominators.num_sequences


def _log_ratio(x: LossInputs) -> torch.Tensor:
    """[B, C] float32, nats, with gradient; 0 where the mask is False."""
    return (x.logprobs - x.old_logprobs.detach()).masked_fill(~x.mask, 0.0)


def _clipped(x: LossInputs, log_ratio: torch.Tensor, weights: torch.Tensor) -> LossTerms:
    """PPO's pessimistic bound, token by token; `log_ratio`, `weights`: [B, C] float32."""
    advantages = x.advantages.detach()
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1.0 - x.clip_low, 1.0 + x.clip_high)
    terms = -torch.minimum(ratio * advantages, bounded * advantages)
    clipped = bounded * advantages < ratio * advantages
    return LossTerms(terms, weights, ratio.detach(), (clipped & x.mask).detach())
