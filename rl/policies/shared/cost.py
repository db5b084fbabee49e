"""Counting what a policy's module computes, at the places where it does.

A forward is counted when it runs, its backward when a gradient arrives: a forward kept from the
rollout has its backward counted in the learner's phase, and one whose gradient nobody asks for
never.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rl.meter import flop_meter
from rl.meter.flop_meter import Work
from rl.meter.flops import LanguageModel, prefix_tree_pairs

if TYPE_CHECKING:
    import torch

    from rl.api.types import PackedGroup


def count_row(sizes: LanguageModel, groups: Iterable[PackedGroup], hidden: torch.Tensor) -> None:
    """All layers over one packed row; `hidden` [..., S, D] is what they gave."""
    num_tokens = hidden.shape[-2]
    num_pairs = sum(prefix_tree_pairs(g.prompt_len, g.completion_lens) for g in groups)
    weight_bytes = sizes.num_weights * hidden.element_size()
    flop_meter.add_passes(
        hidden,
        Work(sizes.forward_flops(num_tokens, num_pairs), weight_bytes),
        Work(sizes.backward_flops(num_tokens, num_pairs), weight_bytes),
    )


def count_step(sizes: LanguageModel, hidden: torch.Tensor, num_keys: int) -> None:
    """One token of each row; `hidden` [G, 1, D], each over `num_keys` keys, itself included."""
    num_rows = hidden.shape[0]
    num_values = sizes.num_weights + sizes.num_cached * num_rows * num_keys
    flops = sizes.forward_flops(num_rows, num_rows * num_keys) + sizes.head_flops(num_rows)
    flop_meter.add(Work(flops, num_values * hidden.element_size()))


def count_head(logits: torch.Tensor, hidden: torch.Tensor, trained: bool) -> None:
    """`logits` [N, ids] of `hidden` [N, D]; a trained head takes a gradient of its own."""
    flops = 2.0 * hidden.shape[-1] * logits.numel()
    flop_meter.add_passes(logits, Work(flops), Work(flops * (2 if trained else 1)))
