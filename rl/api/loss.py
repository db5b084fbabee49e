"""The interface of losses: pure functions of a micro-batch's tokens (example: docs/plugins.md).

Axes: `_B` completions in the micro-batch, `_C` completion tokens, right-padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from rl.api.plugin import brief

if TYPE_CHECKING:
    import torch

DividedBy = Literal["num_tokens", "num_sequences", "num_completions"]


@dataclass(frozen=True)
class Denominators:
    """Counts of one optimizer step over all ranks and micro-batches; losses divide by them."""

    num_tokens: float
    """Tokens that carry loss."""
    num_sequences: float
    """Completions with at least one such token."""
    num_completions: float
    """Completions the step was planned with, dropped and masked ones included (a constant)."""
    max_completion_tokens: int
    """The sampling limit (a constant)."""


@dataclass(frozen=True, eq=False)
class LossInputs:
    """One micro-batch; tensors are [B, C] float32 on the policy's device."""

    logprobs: torch.Tensor
    """Nats, under the current policy, with gradient; 0 where the mask is False."""
    old_logprobs: torch.Tensor
    """Nats, before the iteration's first update; no gradient."""
    sampler_logprobs: torch.Tensor
    """Nats, from the inference engine; the importance weights already correct for them."""
    advantages: torch.Tensor
    """Per token, as a KL in the reward differs by token; no gradient."""
    mask: torch.Tensor
    """Bool: tokens that carry loss; others may hold anything, infinities included."""
    denominators: Denominators
    """For the whole step over all ranks: any split into micro-batches gives the same gradient."""
    clip_low: float
    """`algorithm.clip_low`, distance from 1."""
    clip_high: float
    """`algorithm.clip_high`, distance from 1."""


@dataclass(frozen=True, eq=False)
class LossTerms:
    """What a loss returns, all [B, C]; the step's loss is
    sum(weights * (importance * terms + kl_coeff * kl))."""

    terms: torch.Tensor
    """Float32, to be minimised, with gradient; any finite value where the mask is False."""
    weights: torch.Tensor
    """Float32, what each term is multiplied by; 0 where the mask is False."""
    ratio: torch.Tensor
    """pi_new / pi_old as the loss uses it, detached; for metrics."""
    clipped: torch.Tensor
    """Bool: the token gives no gradient, or its weight was cut; for metrics."""


Loss = Callable[[LossInputs], LossTerms]


def divided_by(count: DividedBy) -> Callable[[Loss], Loss]:
    """Declare the denominator of a loss's `weights` where it is not 'num_tokens'; the step corrects
    it by planned / graded after judging."""
    assert count in get_args(DividedBy), f"{count!r} is none of {get_args(DividedBy)}"

    def mark(loss: Loss) -> Loss:
        loss.divided_by = count  # type: ignore[attr-defined]
        return loss

    return mark


def divisor(loss: Loss, denominators: Denominators) -> float:
    """The count of the whole step that its weights are divided by."""
    count: DividedBy = getattr(loss, "divided_by", "num_tokens")
    return float(getattr(denominators, count))


def terms_problem(terms: object, shape: Sequence[int]) -> str:
    """Why a loss's return value is unusable: 'returns None ...'; '' if it is not. `shape`: [B, C]
    of `LossInputs.logprobs`."""
    if not isinstance(terms, LossTerms):
        return f"returns {brief(terms)}; expected rl.api.loss.LossTerms"
    for name, value in vars(terms).items():
        if tuple(getattr(value, "shape", ("none",))) != tuple(shape):
            found = f"of shape {tuple(value.shape)}" if hasattr(value, "shape") else brief(value)
            return f"{name} is {found}; expected a tensor of shape {tuple(shape)}, as x.logprobs"
    return ""
