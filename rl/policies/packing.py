"""Packs prompts and completions into one row, and computes the indices of the row's tokens.

Axes: `_S` tokens of the row, `_N` completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby, pairwise
from typing import TYPE_CHECKING

from rl.api.types import PackedGroup, Prompt, Row

if TYPE_CHECKING:
    import torch


def pack(rows: Sequence[Row]) -> tuple[list[int], tuple[PackedGroup, ...], list[Prompt]]:
    """(token ids of the packed row, its groups, their prompts). Adjacent rows with the same
    `Prompt` object form one group: [prompt | completion | completion | ...], without padding.
    A prompt attends to itself, a completion to its prompt and to itself, both causally:

        prompt      x            x: the tokens before it in its prompt or completion (`Packing.own`)
        first       o x          o: all tokens of its group's prompt (`Packing.across`)
        second      o . x
    """
    packed: list[int] = []
    groups, prompts = [], []
    for prompt, members in groupby(rows, lambda row: row[0]):  # prompts are equal if identical
        completions = [ids for _, ids in members]
        lens = tuple(map(len, completions))
        groups.append(PackedGroup(len(packed), len(prompt.token_ids), lens))
        prompts.append(prompt)
        packed.extend(chain(prompt.token_ids, *completions))
    return packed, tuple(groups), prompts


def positions(
    groups: Sequence[PackedGroup], prompt_positions: Sequence[torch.Tensor]
) -> torch.Tensor:
    """[..., S]: each prompt's own [..., P]; its completions continue from the largest of these."""
    import torch

    parts = []
    for group, prompt_ids in zip(groups, prompt_positions, strict=True):
        next_id = prompt_ids.max() + 1
        completion_ids = [next_id + torch.arange(length) for length in group.completion_lens]
        parts += [prompt_ids, *(ids.expand(*prompt_ids.shape[:-1], -1) for ids in completion_ids)]
    return torch.cat(parts, dim=-1)


def completion_spans(groups: Iterable[PackedGroup]) -> Iterator[tuple[int, int]]:
    """(start, end) of each of the B completions in the row."""
    for group in groups:
        ends = accumulate(group.completion_lens, initial=group.start + group.prompt_len)
        yield from pairwise(ends)


def completion_tokens(groups: Sequence[PackedGroup]) -> torch.Tensor:
    """[4, N] int64, per completion token: its completion b, its index in b, its position in S, and
    the position of the state that predicts it (for a first token, the last prompt token's)."""
    import torch

    spans = completion_spans(groups)
    tokens = []
    for group in groups:
        last_of_prompt = group.start + group.prompt_len - 1
        tokens += [(next(spans), last_of_prompt) for _ in group.completion_lens]
    columns_BC = [torch.arange(end - start) for (start, end), _ in tokens]
    rows_BC = [torch.full_like(columns, b) for b, columns in enumerate(columns_BC)]
    columns_N, rows_N = torch.cat(columns_BC), torch.cat(rows_BC)
    starts_B = torch.tensor([start for (start, _), _ in tokens])
    prompt_ends_B = torch.tensor([last for _, last in tokens])
    positions_N = starts_B[rows_N] + columns_N
    predictors_N = torch.where(columns_N == 0, prompt_ends_B[rows_N], positions_N - 1)
    return torch.stack([rows_N, columns_N, positions_N, predictors_N])
