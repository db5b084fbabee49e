"""Counting what a policy's module computes, at the places where it does.

What: one call each for a packed row, a decoding step and the head. What not: the formulas
(`rl/system/flops.py`), the vision tower, which is counted by size (`_qwen_pictures.py`). Called by
the modules' parts.

A forward is counted when it runs, its backward when a gradient arrives: a forward kept from the
rollout has its backward counted in the learner's phase, and one whose gradient nobody asks for
never.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rl.system import work
from rl.system.flops import LanguageModel, prefix_tree_pairs
from rl.system.work import Work

if TYPE_CHECKING:
    import torch

    from rl.policies._logprobs import Head
    from rl.types import PackedGroup


def count_row(sizes: LanguageModel, groups: Iterable[PackedGroup], hidden: torch.Tensor) -> None:
    """All layers over one packed row; `hidden` [..., S, D] is what they gave."""
    num_tokens = hidden.shape[-2]
    num_pairs = sum(prefix_tree_pairs(g.prompt_len, g.completion_lens) for g in groups)
    weight_bytes = sizes.num_weights * hidden.element_size()
    work.add_passes(
        hidden,
        Work(sizes.forward_flops(num_tokens, num_pairs), weight_bytes),
        Work(sizes.backward_flops(num_tokens, num_pairs), weight_bytes),
    )


def count_step(sizes: LanguageModel, hidden: torch.Tensor, num_keys: int) -> None:
    """One token of each row; `hidden` [G, 1, D], each over `num_keys` keys, itself included."""
    num_rows = hidden.shape[0]
    num_values = sizes.num_weights + sizes.num_cached * num_rows * num_keys
    flops = sizes.forward_flops(num_rows, num_rows * num_keys) + sizes.head_flops(num_rows)
    work.add(Work(flops, num_values * hidden.element_size()))


def count_head(logits: torch.Tensor, hidden: torch.Tensor, head: Head) -> None:
    """`logits` [N, ids] of `hidden` [N, D]; a trained head takes a gradient of its own."""
    flops = 2.0 * hidden.shape[-1] * logits.numel()
    trained = any(parameter.requires_grad for parameter in head.parameters())
    work.add_passes(logits, Work(flops), Work(flops * (2 if trained else 1)))
