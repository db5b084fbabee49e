"""Attention over packed rows, recomputation of activations, decoding with a key-value cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from rl.algorithm.attention_kernels import Kernel, Runs, join
from rl.api.types import PackedGroup, TokenBatch

# ---- decoder -------------------------------------------------------------------------------------
# Decodes with the policy's module and a key-value cache, for the engine `transformers`.
#
# Axes: `_P` prompts; `_B` rows in the order of the prompts, those of a prompt adjacent; `_S`
# packed tokens; `_T` cached keys; `_H` heads; `_D` width of the states or of a head; `_V`
# vocabulary.


class PackedDecoder:
    """An `rl.api.policy.Decoder`. One packed forward reads the prompts; their keys and values are
    then copied to right-padded rows. Later steps mask the padding, so each row is decoded as it
    would be alone, up to float rounding."""

    def __init__(self, module: Any, batch: TokenBatch, num_rows: int) -> None:
        """`module`: the policy's `TrainedModule`. `batch`: P prompts with empty completions, each
        decoded in `num_rows` rows."""
        assert all(group.completion_lens == (0,) for group in batch.groups), (
            "a prompt to decode must come with exactly one empty completion"
        )
        self._module = module
        self._model = module.base_model
        self._batch = batch
        self._num_rows = num_rows
        self._prompt_lens = [group.prompt_len for group in batch.groups]
        mask_PT = pad_sequence([torch.ones(length) for length in self._prompt_lens], True)
        self._mask_BT = self._repeat_prompts(mask_PT.bool().to(batch.input_ids.device))
        self._cache: Any = None
        positions = batch.model_inputs["position_ids"].split(self._prompt_lens, dim=-1)
        self._position_B = self._repeat_prompts(torch.stack([ids.max() + 1 for ids in positions]))
        self._axes_before_tokens = positions[0].shape[:-1]  # () or, with M-RoPE, (3,)

    @torch.no_grad()
    def step(self, token_ids_B: Sequence[int] | None) -> torch.Tensor:
        """Append one token to every row (None: read the prompts). Returns [B, V] float32 logits of
        each row's next token."""
        if token_ids_B is None:
            out = self._module.backbone(self._batch, use_cache=True)
            self._cache = out.past_key_values
            for layer in self._cache.layers:
                layer.keys, layer.values = self._as_rows(layer.keys), self._as_rows(layer.values)
            last_tokens = [group.start + group.prompt_len - 1 for group in self._batch.groups]
            last_BD = self._repeat_prompts(out.last_hidden_state[0, last_tokens])
        else:
            ids_B1 = torch.tensor(token_ids_B, device=self._mask_BT.device)[:, None]
            self._mask_BT = torch.cat([self._mask_BT, torch.ones_like(ids_B1).bool()], dim=1)
            out = self._model.model(
                input_ids=ids_B1,
                attention_mask=self._mask_BT[:, None, None],
                position_ids=self._position_B.expand(*self._axes_before_tokens, -1)[..., None],
                past_key_values=self._cache,
                use_cache=True,
            )
            self._position_B = self._position_B + 1
            last_BD = out.last_hidden_state[:, -1]
        logits: torch.Tensor = self._model.lm_head(last_BD).float()
        return logits

    def _as_rows(self, packed: torch.Tensor) -> torch.Tensor:
        """[1, H, S, D] -> [B, H, T, D], zeros after each prompt."""
        prompts_THD = packed[0].transpose(0, 1).split(self._prompt_lens)
        padded_PTHD = pad_sequence(list(prompts_THD), batch_first=True)
        return self._repeat_prompts(padded_PTHD.transpose(1, 2))

    def _repeat_prompts(self, tensor_P: torch.Tensor) -> torch.Tensor:
        """[P, ...] -> [B, ...]."""
        return tensor_P.repeat_interleave(self._num_rows, dim=0)


# ---- packed attention ----------------------------------------------------------------------------
# Attention over packed rows, for transformers: a group's prompt is computed once, not G times.
#
# Axes: as in `rl/algorithm/attention_kernels.py`; `_S` tokens of the row.

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
        """Each group's completions, which are adjacent, as one slice."""
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
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """For a packed row, [1, H, S, D] -> [1, S, H, D]. Without `packing`, [B, H, T, D] ->
    [B, T, H, D], with `attention_mask`, or causal if that is None."""
    assert not dropout, "dropout would make training differ from sampling"
    scale, window = others.get("scaling"), others.get("sliding_window")
    # Tokens of each prompt with its longest completion.
    lens = (
        [g.prompt_len + max(g.completion_lens, default=0) for g in packing.groups]
        if packing
        else []
    )
    is_other = scale is not None and not math.isclose(scale, query.shape[-1] ** -0.5, rel_tol=1e-6)
    is_cut = window is not None and window < max(lens, default=key.shape[2])
    if is_other or is_cut or any(others.get(name) is not None for name in ("softcap", "s_aux")):
        raise ValueError(
            f"{type(module).__name__}: packed rows have no soft cap, sinks, other scale, or window "
            "that is shorter than a sequence; this model cannot be a policy "
            f"(scaling {scale}, sliding_window {window}, others {sorted(others)})"
        )
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
                parts = prompt_grad.split([own.stop - own.start for own in slices])
                for own_slice, added in zip(slices, parts, strict=True):
                    grad[own_slice] += added
        return (*grads, None)


def _take(tensor: torch.Tensor, slices: Sequence[slice], dim: int = 0) -> torch.Tensor:
    """The concatenated slices of `tensor`; a view if there is only one."""
    parts = [tensor.narrow(dim, part.start, part.stop - part.start) for part in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


# ---- recomputing ---------------------------------------------------------------------------------
# Makes a forward keep less for the backward.


def spare_activations(model: Any, gradient_checkpointing: bool | Literal["mlp"]) -> None:
    """Make the decoder's layers save less for the backward.

    `gradient_checkpointing` True: they save only each layer's input; 'mlp': of the MLPs only their
    inputs, besides what False does. False: transformers' norms and PEFT's adapters save no float32
    copy of their half-precision input, which is saved anyway.
    """
    if gradient_checkpointing is True:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return
    for layer in model.get_decoder().layers:
        if gradient_checkpointing == "mlp":
            recompute(layer.mlp)
        for name, norm in layer.named_modules():
            if name.endswith("norm") and norm.weight.dtype != torch.float32:
                recompute(norm, preserve_rng_state=False)
    _keep_adapters_inputs(model)


def recompute(module: Any, **options: Any) -> None:
    """Save only this module's input for the backward; recompute its activations there."""
    forward: Callable[[torch.Tensor], torch.Tensor] = module.forward

    def recomputed(hidden: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return forward(hidden)
        return checkpoint(forward, hidden, use_reentrant=False, **options)

    module.forward = recomputed


def _keep_adapters_inputs(model: Any) -> None:
    """Save adapter inputs in their own dtype, one tensor for all readers; the backward casts it.

    Adapters with dropout are left as they are: PEFT applies it to the float32 copy.
    """
    from peft.tuners.lora import LoraLayer

    for layer in model.modules():
        if not isinstance(layer, LoraLayer):
            continue
        for name, down in layer.lora_A.items():
            if isinstance(layer.lora_dropout[name], torch.nn.Identity):
                layer.cast_input_dtype_enabled = False
                down.forward = lambda hidden, down=down: _FloatLinear.apply(hidden, down.weight)


class _FloatLinear(torch.autograd.Function):
    """[*, D] of any float dtype, times a float32 weight [R, D] -> [*, R] float32."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return functional.linear(hidden.to(weight.dtype), weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = ctx.saved_tensors
        rows = hidden.to(weight.dtype).flatten(0, -2)
        return (grad @ weight).to(hidden.dtype), grad.flatten(0, -2).T @ rows
