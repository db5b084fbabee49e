"""Counting what a policy's module computes, at the places where it does.

A forward is counted when it runs, its backward when a gradient arrives: a forward kept from the
rollout has its backward counted in the learner's phase, and one whose gradient nobody asks for
never.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

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


def count_pictures(config: Any, grids: Iterable[tuple[int, int]], bytes_per_value: int) -> None:
    """Qwen2.5-VL's vision tower over pictures of (rows, columns) patches, forward only.

    `config`: the tower's. Patches see their window, in some layers their whole picture.
    """
    width, merge = config.hidden_size, config.spatial_merge_size
    window = config.window_size // config.patch_size // merge
    per_layer = 4 * width**2 + 3 * width * config.intermediate_size
    embedding = config.in_channels * config.temporal_patch_size * config.patch_size**2 * width
    merged = width * merge**2
    merger = merged * (merged + config.out_hidden_size)
    num_full = len(config.fullatt_block_indexes)
    products = 0
    for rows, columns in grids:
        num_patches = rows * columns
        windows = _squares(rows // merge, window) * _squares(columns // merge, window)
        pairs = num_full * num_patches**2 + (config.depth - num_full) * windows * merge**4
        products += num_patches * (embedding + config.depth * per_layer + merger // merge**2)
        products += 2 * width * pairs
    num_weights = embedding + config.depth * per_layer + merger
    flop_meter.add(Work(2.0 * products, num_weights * bytes_per_value))


def _squares(length: int, window: int) -> int:
    """Sum of the squared sizes of the windows that a side is cut into."""
    full, rest = divmod(length, window)
    return full * window**2 + rest**2
