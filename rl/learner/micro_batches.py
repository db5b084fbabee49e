"""Packs a rank's groups into micro-batches, keeps ranks in step, and runs forwards without graphs.

Axes: `_P` prompts on this rank, `_G` completions of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch

from rl.api.policy import Policy
from rl.api.types import Prompt, Row, TokenBatch, TokenOutputs
from rl.ranks.dist import Dist, is_sharded

Member = tuple[int, int]
"""(p, g): completion g of this rank's prompt p."""
FILLER: Member = (-1, 0)
"""A row without loss that keeps this rank in step with the others."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows of one packed forward: whole groups, as many as the token budget takes."""

    rows: tuple[Row, ...]
    members: tuple[Member, ...]
    """The completion that each row belongs to."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed row, which holds each group's prompt once."""
        prompts = {id(prompt): len(prompt.token_ids) for prompt, _ in self.rows}
        return sum(prompts.values()) + sum(len(ids) for _, ids in self.rows)

    def rows_of(self, members: Sequence[Member]) -> list[Row]:
        row_of = dict(zip(self.members, self.rows, strict=True))
        return [row_of[member] for member in members]


def pack_groups(
    prompts_P: Sequence[Prompt],
    ids_PG: Sequence[Sequence[Sequence[int]]],
    max_tokens: int,
    groups: range | None = None,
    num_sampled_P: Sequence[int] | None = None,
) -> list[MicroBatch]:
    """Pack `groups` (None: all), in order, into micro-batches of at most `max_tokens`.

    A longer group is split between completions; a longer completion gets a micro-batch of its own.
    `num_sampled_P`: how many completions of each group the policy sampled (None: all); the others
    are paired with the prompt's `plain`.
    """
    packs: list[list[tuple[Row, Member]]] = []
    size = 0
    for p in range(len(prompts_P)) if groups is None else groups:
        num_sampled = len(ids_PG[p]) if num_sampled_P is None else num_sampled_P[p]
        group = tuple(
            (prompts_P[p] if g < num_sampled else prompts_P[p].plain, ids)
            for g, ids in enumerate(ids_PG[p])
        )
        if not packs or size + MicroBatch(group, ()).num_tokens > max_tokens:
            packs.append([])
            size = 0
        for g, (prompt, ids) in enumerate(group):
            more = len(ids)
            if not packs[-1] or packs[-1][-1][0][0] is not prompt:
                more += len(prompt.token_ids)
            if packs[-1] and size + more > max_tokens:
                packs.append([])
                size = 0
                more = len(ids) + len(prompt.token_ids)
            size += more
            packs[-1].append(((prompt, ids), (p, g)))
    return [
        MicroBatch(tuple(row for row, _ in pack), tuple(member for _, member in pack))
        for pack in packs
        if pack
    ]


def split_evenly(num_groups: int, num_minibatches: int) -> list[range]:
    """Ranges of group numbers, in order, as even as possible; some may be empty."""
    bounds = [num_groups * i // num_minibatches for i in range(num_minibatches + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]


def in_lockstep(
    micro_batches: Sequence[MicroBatch], filler: Row | None, dist: Dist
) -> list[MicroBatch]:
    """The micro-batches, padded with fillers to the largest number on any rank. Collective."""
    missing = dist.max_int(len(micro_batches)) - len(micro_batches)
    if not missing:
        return list(micro_batches)
    assert filler is not None, "some rank has a row"
    return [*micro_batches, *(MicroBatch((filler,), (FILLER,)) for _ in range(missing))]


def shared_filler(rows: Sequence[Row], dist: Dist) -> Row | None:
    """The row to use in fillers: this rank's first row or, if this rank has none, another rank's;
    None if no rank has a row. Collective."""
    first_row = rows[0] if rows else None
    if not dist.any(first_row is None):
        return first_row
    portable = None
    if first_row is not None:
        prompt = first_row[0]
        # Keeps the forward's picture inputs, because every rank must run the vision tower.
        sample = replace(prompt.sample, sources=(), target=None)
        plain = prompt.without_thought and replace(prompt.without_thought, sample=sample)
        portable = (replace(prompt, sample=sample, without_thought=plain), first_row[1])
    gathered = [row for row in dist.gather(portable) if row is not None]
    return first_row or (gathered[0] if gathered else None)


def by_member(
    micro_batch: MicroBatch, members: Sequence[Member], outputs: TokenOutputs
) -> dict[Member, list[float]]:
    """Completion -> its [T] log-probs, without padding."""
    values_BC = outputs.logprobs.detach().tolist()
    rows = micro_batch.rows_of(members)
    return {
        member: values_C[: len(ids)]
        for member, values_C, (_, ids) in zip(members, values_BC, rows, strict=True)
    }


class Forwards(Protocol):
    """A batch's micro-batches, and the forward over each."""

    collective: bool
    """Whether every rank must take part in each forward (ZeRO-3 gathers weights). If so, all
    forwards run before any work that ranks do at their own pace."""

    @property
    def micro_batches(self) -> Sequence[MicroBatch]: ...

    def states(self, micro_batch: MicroBatch) -> tuple[TokenBatch, TokenOutputs]:
        """The forward whose hidden states `decode_actions` reads, if the policy `reads_states`."""
        ...


class Inference:
    """Runs forwards without a graph, with the module in evaluation mode."""

    def __init__(
        self,
        policy: Policy,
        prompts_P: Sequence[Prompt],
        ids_PG: Sequence[Sequence[Sequence[int]]],
        max_tokens: int,
        dist: Dist,
        weights: Callable[[], AbstractContextManager[None]] = nullcontext,
        num_sampled_P: Sequence[int] | None = None,
    ) -> None:
        """`weights`: context manager around each forward, such as the policy's `reference`.
        `num_sampled_P`: as in `pack_groups`. Collective if `self.collective`."""
        self._policy = policy
        self._weights = weights
        self.collective = is_sharded(policy.module)
        micro_batches = pack_groups(prompts_P, ids_PG, max_tokens, num_sampled_P=num_sampled_P)
        if self.collective:
            rows = [row for micro_batch in micro_batches for row in micro_batch.rows]
            micro_batches = in_lockstep(micro_batches, shared_filler(rows, dist), dist)
        self.micro_batches: Sequence[MicroBatch] = micro_batches

    def forward(self, micro_batch: MicroBatch) -> tuple[TokenBatch, TokenOutputs]:
        return self._run(self._policy.collate(micro_batch.rows))

    def states(self, micro_batch: MicroBatch) -> tuple[TokenBatch, TokenOutputs]:
        rows = micro_batch.rows
        return self._run(self._policy.collate_states(rows) or self._policy.collate(rows))

    def _run(self, batch: TokenBatch) -> tuple[TokenBatch, TokenOutputs]:
        module = self._policy.module
        was_training = module.training
        module.eval()
        try:
            with torch.no_grad(), self._weights():
                return batch, module(batch)
        finally:
            module.train(was_training)
