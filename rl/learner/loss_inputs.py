"""A micro-batch's rows -> padded tensors for the loss.

Axes: `_B` rows of a micro-batch, `_C` completion tokens, right-padded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl.api.loss import Denominators, LossInputs
from rl.api.types import Row, TrainSequence
from rl.config.schema import AlgorithmConfig


def loss_inputs(
    config: AlgorithmConfig,
    rows: Sequence[Row],
    sequences_B: Sequence[TrainSequence | None],
    logprobs: torch.Tensor,
    old_B: Sequence[Sequence[float]] | None,
    planned: Denominators,
) -> LossInputs:
    """A row without a sequence carries no loss. Advantages are [B, 1].

    `logprobs` [B, C] float32, nats, with gradient; `old_B`: those before the iteration's first
    update, None where these are it.
    """
    device = logprobs.device
    silent_B = [(0.0,) * len(ids) for _, ids in rows]
    pairs = list(zip(sequences_B, silent_B, strict=True))
    masks_B = [s.loss_mask if s else silent for s, silent in pairs]
    sampler_B = [s.sampler_logprobs if s else silent for s, silent in pairs]
    mask = pad(masks_B, torch.bool, device)
    logprobs = logprobs.masked_fill(~mask, 0.0)
    old = logprobs.detach()
    if old_B is not None:
        old = pad(old_B, torch.float32, device).masked_fill(~mask, 0.0)
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        sampler_logprobs=pad(sampler_B, torch.float32, device),
        advantages=pad([[s.advantage if s else 0.0] for s in sequences_B], torch.float32, device),
        mask=mask,
        denominators=planned,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )


def pad(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[B, C], zeros after each row's end."""
    width = max(len(row) for row in rows)
    padded = [list(row) + [0] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=dtype, device=device).reshape(len(rows), width)
