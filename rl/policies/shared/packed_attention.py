"""Attention over packed rows, for transformers: a group's prompt is computed once, not G times.

Axes: as in `rl/algorithm/attention_kernels.py`; `_S` tokens of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional

from rl.algorithm.attention_kernels import Kernel, Runs, join
from rl.api.types import PackedGroup

NAME = "packed_groups"
"""Name of `attention` in transformers' registry."""


@dataclass(frozen=True)
class Packing:
    """The attention layout of one packed row; built once per forward, read by every layer."""

    groups: tuple[PackedGroup, ...]
    kernel: Kernel

    @cached_property
    def own(self) -> Runs:
        """Every token of the row attends within its own prompt or completion."""
        lens = [(group.prompt_len, *group.completion_lens) for group in self.groups]
        flat = tuple(length for group_lens in lens for length in group_lens)
        return Runs(flat, flat, causal=True)

    @cached_property
    def across(self) -> Runs:
        """A group's completions, as one run, attend to their prompt."""
        return Runs(
            tuple(sum(group.completion_lens) for group in self.groups),
            tuple(group.prompt_len for group in self.groups),
            causal=False,
        )

    @cached_property
    def prompt_slices(self) -> list[slice]:
        return [slice(group.start, group.start + group.prompt_len) for group in self.groups]

    @cached_property
    def completion_slices(self) -> list[slice]:
        """Of each group, its adjacent completions."""
        return [
            slice(prompt.stop, prompt.stop + length)
            for prompt, length in zip(self.prompt_slices, self.across.query_lens, strict=True)
        ]


def register() -> str:
    """Register `attention` with transformers, without a mask function: no mask is built."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    return NAME


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """For a packed row, [1, H, S, D] -> [1, S, H, D]. Without `packing`, [B, H, T, D] ->
    [B, T, H, D], with `attention_mask`, or causal if that is None."""
    assert not dropout, "dropout would make training differ from sampling"
    if packing is None:
        out = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=attention_mask is None and query.shape[2] > 1,
            enable_gqa=True,
        )
        return out.transpose(1, 2), None
    tokens_first = (x[0].transpose(0, 1) for x in (query, key, value))
    out = _PackedAttention.apply(*tokens_first, packing)
    return out[None], None


class _PackedAttention(torch.autograd.Function):
    """Joins attention within runs and attention to prompts by log-sum-exp: copies no key per
    completion, computes no padding, and allocates nothing of size [S, S]."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing
    ) -> torch.Tensor:
        out, lse = packing.kernel.forward(query, key, value, packing.own)
        if packing.across.num_queries:
            prompts, completions = packing.prompt_slices, packing.completion_slices
            prompt_out, prompt_lse = packing.kernel.forward(
                _take(query, completions),
                _take(key, prompts),
                _take(value, prompts),
                packing.across,
            )
            lens = packing.across.query_lens
            prompt_parts = zip(prompt_out.split(lens), prompt_lse.split(lens, dim=1), strict=True)
            for part, prompt_part in zip(completions, prompt_parts, strict=True):
                out[part], lse[:, part] = join(out[part], lse[:, part], *prompt_part)
        ctx.packing = packing
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        packing: Packing = ctx.packing
        query, key, value, out, lse = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        grads = packing.kernel.backward(grad_out, query, key, value, out, lse, packing.own)
        if packing.across.num_queries:
            prompts, completions = packing.prompt_slices, packing.completion_slices
            prompt_grads = packing.kernel.backward(
                _take(grad_out, completions),
                _take(query, completions),
                _take(key, prompts),
                _take(value, prompts),
                _take(out, completions),
                _take(lse, completions, dim=1),
                packing.across,
            )
            grad_slices = (completions, prompts, prompts)
            for grad, prompt_grad, slices in zip(grads, prompt_grads, grad_slices, strict=True):
                parts = prompt_grad.split([part.stop - part.start for part in slices])
                for grad_slice, part in zip(slices, parts, strict=True):
                    grad[grad_slice] += part
        return (*grads, None)


def _take(tensor: torch.Tensor, slices: Sequence[slice], dim: int = 0) -> torch.Tensor:
    """The concatenated slices of `tensor`; a view if there is only one."""
    parts = [tensor.narrow(dim, part.start, part.stop - part.start) for part in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
