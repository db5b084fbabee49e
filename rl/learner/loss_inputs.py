"""Lists of a micro-batch's rows -> padded tensors for the loss.

Axes: `_B` rows of a micro-batch, `_C` completion tokens, right-padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl.api.types import Row, TrainSequence


@dataclass(frozen=True, eq=False)
class RowTensors:
    """What the loss needs of a micro-batch's rows beside log-probs, on the policy's device."""

    mask: torch.Tensor
    """[B, C] bool: tokens that carry loss."""
    advantages: torch.Tensor
    """[B, 1] float32."""
    sampler_logprobs: torch.Tensor
    """[B, C] float32, nats; 0 where padded."""


def loss_inputs(
    rows: Sequence[Row], sequences_B: Sequence[TrainSequence | None], device: str
) -> RowTensors:
    """Padded to the longest completion; a row without a sequence carries no loss."""
    silent_B = [(0.0,) * len(ids) for _, ids in rows]
    pairs = list(zip(sequences_B, silent_B, strict=True))
    masks = [s.loss_mask if s else (False,) * len(silent) for s, silent in pairs]
    return RowTensors(
        mask=pad(masks, torch.bool, device),
        advantages=pad([[s.advantage if s else 0.0] for s in sequences_B], torch.float32, device),
        sampler_logprobs=pad(
            [s.sampler_logprobs if s else silent for s, silent in pairs], torch.float32, device
        ),
    )


def pad(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: str) -> torch.Tensor:
    """[B, C], zeros after each row's end."""
    width = max(len(row) for row in rows)
    padded = [list(row) + [0] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=dtype, device=device).reshape(len(rows), width)
