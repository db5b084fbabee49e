"""Cutting a rank's sequences into the micro-batches that all ranks run together.

What: split by group, pad to the other ranks' number of micro-batches, lists -> padded tensors. What
not: model inputs (the policy's `collate`) or losses. Called by `learner.py`.

Axes: `_B` completions of a micro-batch, `_C` completion tokens, right-padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import torch

from rl.types import Prompt, TrainSequence

if TYPE_CHECKING:
    from rl.system.dist import Dist

Row = tuple[Prompt, Sequence[int]]
"""A prompt and the completion's token ids."""
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What the loss needs of a few sequences, on the policy's device."""

    rows: list[Row]
    mask: torch.Tensor
    """[B, C] bool: tokens that carry loss."""
    advantages: torch.Tensor
    """[B, 1] float32."""
    sampler_logprobs: torch.Tensor
    """[B, C] float32, nats; 0 where padded."""
    old_logprobs: torch.Tensor | None
    """[B, C] float32, nats, 0 where padded; None: the current ones, detached."""


def split_by_group(sequences: Sequence[TrainSequence], num_parts: int) -> list[list[TrainSequence]]:
    """`num_parts` lists of whole groups, as even as they come, in order; some may be empty.

    A group's members share their `Prompt` object: one sample can be drawn twice in an iteration.
    """
    groups: dict[Prompt, list[TrainSequence]] = {}
    for sequence in sequences:
        groups.setdefault(sequence.prompt, []).append(sequence)
    ordered = list(groups.values())
    bounds = [len(ordered) * part // num_parts for part in range(num_parts + 1)]
    return [
        [sequence for group in ordered[start:end] for sequence in group]
        for start, end in pairwise(bounds)
    ]


def aligned_chunks(items: Sequence[T], size: int, dist: Dist) -> list[Sequence[T]]:
    """Chunks of `size`, followed by empty ones up to the largest rank's number of chunks.

    Collective. All ranks gather sharded weights together, so all must run as many forwards.
    """
    num_chunks = dist.max_int(-(-len(items) // size))
    return [items[size * i : size * (i + 1)] for i in range(num_chunks)]


def shared_filler(rows: Sequence[Row], dist: Dist) -> Row | None:
    """A row for an empty chunk: the rank's own first, or another rank's if it has none.

    Collective. None when no rank has a row.
    """
    own = rows[0] if rows else None
    if not dist.any(own is None):
        return own
    portable = None
    if own is not None:
        prompt = own[0]
        # What the forward needs travels, pictures included: every rank must run the vision tower.
        sample = replace(prompt.sample, source=None, target=None)
        portable = (replace(prompt, sample=sample), own[1])
    gathered = [row for row in dist.gather(portable) if row is not None]
    return own or (gathered[0] if gathered else None)


def as_micro_batch(sequences: Sequence[TrainSequence], filler: Row, device: str) -> MicroBatch:
    """Pad to the longest completion; no sequences: the filler, carrying no loss."""
    if not sequences:
        silent = (0.0,) * len(filler[1])
        mask = (False,) * len(filler[1])
        sequences = [TrainSequence(filler[0], tuple(filler[1]), mask, 0.0, silent)]
    old = None
    if all(s.old_logprobs is not None for s in sequences):
        old = _pad([s.old_logprobs or () for s in sequences], torch.float32, device)
    return MicroBatch(
        rows=[(s.prompt, s.token_ids) for s in sequences],
        mask=_pad([s.loss_mask for s in sequences], torch.bool, device),
        advantages=_pad([[s.advantage] for s in sequences], torch.float32, device),
        sampler_logprobs=_pad([s.sampler_logprobs for s in sequences], torch.float32, device),
        old_logprobs=old,
    )


def _pad(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: str) -> torch.Tensor:
    """[B, C], zeros after each row's end."""
    width = max(len(row) for row in rows)
    padded = [list(row) + [0] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=dtype, device=device).reshape(len(rows), width)
