"""Counts executed FLOPs with torch's counter, corrected for attention on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

Shape = Sequence[int]


def flop_counter() -> FlopCounterMode:
    """A context whose `get_total_flops()` sums over all operations; a multiply-add counts as two.
    torch alone does not count the CPU's attention kernel, and counts causal attention in full."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    mapping = {kernel: _attention, backward: _attention_backward}
    return FlopCounterMode(display=False, custom_mapping=mapping)


def flops_of(call: Callable[[], object]) -> int:
    """FLOPs that a call executes; a compiled model runs uncompiled."""
    with torch.compiler.set_stance("force_eager"), flop_counter() as counter:
        call()
    return counter.get_total_flops()


def _attention(
    query: Shape, key: Shape, value: Shape, dropout: float = 0, causal: bool = False, **_: Any
) -> float:
    return sdpa_flop_count(query, key, value) * _computed_share(query, key, causal)


def _attention_backward(
    gradient: Shape, query: Shape, key: Shape, value: Shape, *rest: Any, **_: Any
) -> float:
    _, _, _, causal = rest
    flops = sdpa_backward_flop_count(gradient, query, key, value)
    return flops * _computed_share(query, key, causal)


def _computed_share(query: Shape, key: Shape, causal: bool) -> float:
    """Share of the (query, key) pairs that count: if causal, those on and below the diagonal."""
    num_queries, num_keys = query[-2], key[-2]
    square = min(num_queries, num_keys)
    pairs = square * (square + 1) / 2 + max(0, num_queries - num_keys) * num_keys
    return pairs / (num_queries * num_keys) if causal else 1.0
