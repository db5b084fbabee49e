"""Attention over packed runs. The log-sum-exp lets `join` merge results over several key sets.

A kernel is two functions. `forward` computes attention over some of the keys. `backward` computes
those keys' contribution to the gradients; it takes `out` and `lse` over ALL keys. With
P = exp(q k - lse), dV = P' dO and dS = P * (dO V' - sum(dO * out)) hold for each key alone, so
contributions add up (the recomputation of FlashAttention, Dao et al. 2022, section 3.1).

Axes: `_T` queries, `_K` keys, `_H` query heads, `_Hk` key heads, `_D` head width. With H > Hk,
neighbouring query heads share a key head (GQA). Scores are scaled by 1/sqrt(D).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch

Name = Literal["auto", "sdpa"]
Tensors = tuple[torch.Tensor, ...]
Attended = tuple[torch.Tensor, torch.Tensor]
HALF = (torch.bfloat16, torch.float16)
FLASH_CAPABILITY = (8, 0)
"""CUDA compute capability from which the flash kernels run (Ampere)."""


@dataclass(frozen=True)
class Runs:
    """Lengths of packed runs: the queries of run i attend only to the keys of run i."""

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    causal: bool
    """True: within a run, query n attends to keys 0..n, and the run has as many keys as queries."""

    @cached_property
    def num_queries(self) -> int:
        return sum(self.query_lens)


@dataclass(frozen=True)
class Kernel:
    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Runs], Attended]
    """(query [T, H, D], key [K, Hk, D], value [K, Hk, D], runs) -> (out [T, H, D], lse [H, T]
    float32, natural logarithm). A run with queries but no keys has an undefined result."""
    backward: Callable[..., Tensors]
    """(grad_out, query, key, value, out, lse, runs) -> contributions of these keys to the gradients
    of query, key and value."""


def choose_kernel(name: Name, device: str, dtype: torch.dtype) -> Kernel:
    """'auto' picks flash attention where it can run."""
    torch_device = torch.device(device)
    is_cuda = torch_device.type == "cuda"
    capable = is_cuda and torch.cuda.get_device_capability(torch_device) >= FLASH_CAPABILITY
    if name != "sdpa" and capable and dtype in HALF:
        return VARLEN
    return CPU if torch_device.type == "cpu" else PLAIN


def join(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> Attended:
    """Merge one query set's attention over two key sets: out [T, H, D], lse [H, T] float32."""
    joined = torch.logaddexp(lse, other_lse)
    share = (lse - joined).exp().T[..., None]
    return torch.lerp(other_out.float(), out.float(), share).to(out.dtype), joined


def _by_heads(query: torch.Tensor, num_key_heads: int) -> torch.Tensor:
    """[T, H, D] -> [Hk, H / Hk, T, D], a view: the query heads that share a key head together."""
    return query.unflatten(1, (num_key_heads, -1)).permute(1, 2, 0, 3)


def _by_tokens(by_heads: torch.Tensor) -> torch.Tensor:
    """The inverse of `_by_heads`."""
    return by_heads.permute(2, 0, 1, 3).flatten(1, 2)


def _shared(key: torch.Tensor, num_sharing: int) -> torch.Tensor:
    """[K, Hk, D] -> [Hk, H / Hk, K, D], a view: nothing is repeated in memory."""
    return key.transpose(0, 1)[:, None].expand(-1, num_sharing, -1, -1)


# Kernels that loop over the runs: PyTorch's flash kernels on the CPU, plain attention elsewhere.


def _run_forward(step: Callable[..., Tensors]) -> Callable[..., Attended]:
    """Build a kernel's forward from `step`, the forward of one run in heads-first layout."""

    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: Runs
    ) -> Attended:
        num_heads, num_key_heads = query.shape[1], key.shape[1]
        num_sharing = num_heads // num_key_heads
        out = torch.empty_like(query)
        lse = query.new_empty(num_heads, len(query), dtype=torch.float32)
        for q, k, v, out_of_run, lse_of_run in zip(
            query.split(runs.query_lens),
            key.split(runs.key_lens),
            value.split(runs.key_lens),
            out.split(runs.query_lens),
            lse.split(runs.query_lens, dim=1),
            strict=True,
        ):
            if not len(q):
                continue
            part, part_lse = step(
                _by_heads(q, num_key_heads),
                _shared(k, num_sharing),
                _shared(v, num_sharing),
                runs.causal,
            )
            out_of_run.copy_(_by_tokens(part))
            lse_of_run.copy_(part_lse.flatten(0, 1))
        return out, lse

    return forward


def _run_backward(step: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """Build a kernel's backward from `step`, the backward of one run in heads-first layout."""

    def backward(
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        runs: Runs,
    ) -> Tensors:
        num_key_heads = key.shape[1]
        num_sharing = query.shape[1] // num_key_heads
        grads = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        by_query = (tensor.split(runs.query_lens) for tensor in (grad_out, query, out, grads[0]))
        by_key = (tensor.split(runs.key_lens) for tensor in (key, value, grads[1], grads[2]))
        lse_by_run = lse.split(runs.query_lens, dim=1)
        for grad, q, o, into_q, k, v, into_k, into_v, lse_of_run in zip(
            *by_query, *by_key, lse_by_run, strict=True
        ):
            if not len(q):
                continue
            of_query, of_key, of_value = step(
                _by_heads(grad, num_key_heads),
                _by_heads(q, num_key_heads),
                _shared(k, num_sharing),
                _shared(v, num_sharing),
                _by_heads(o, num_key_heads),
                lse_of_run.unflatten(0, (num_key_heads, -1)),
                runs.causal,
            )
            into_q.copy_(_by_tokens(of_query))
            into_k.copy_(of_key.sum(1).transpose(0, 1))
            into_v.copy_(of_value.sum(1).transpose(0, 1))
        return grads

    return backward


# Without a flash kernel (float32 on a GPU, old GPUs): plain softmax attention in float32.


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) * q.shape[-1] ** -0.5
    if not causal:
        return scores
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, float("-inf"))


def _plain_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Tensors:
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.float()).to(q.dtype), lse


def _plain_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> Tensors:
    probs = (_scores(q, k, causal) - lse[..., None]).exp()
    grad = grad.float()
    grad_v = probs.transpose(-1, -2) @ grad
    inner = (grad * out.float()).sum(-1, keepdim=True)
    grad_scores = probs * (grad @ v.float().transpose(-1, -2) - inner) * q.shape[-1] ** -0.5
    grad_q, grad_k = grad_scores @ k.float(), grad_scores.transpose(-1, -2) @ q.float()
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


# On CUDA one call handles all runs. PyTorch's public function has no backward that accepts a given
# `out` and `lse`, so this code calls the private operators underneath it.


@lru_cache(maxsize=16)
def _cumulative(lens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[runs + 1] int32: where each run starts, and the end. Cached: every layer needs the same."""
    bounds = torch.tensor((0, *lens), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return bounds.to(device, non_blocking=True)


def _bounds(runs: Runs, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    queries, keys = runs.query_lens, runs.key_lens
    return _cumulative(queries, device), _cumulative(keys, device), max(queries), max(keys)


def _varlen_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: Runs
) -> Attended:
    from torch.nn.attention import varlen

    tensors = [tensor.contiguous() for tensor in (query, key, value)]
    bounds = _bounds(runs, query.device)
    # Without `enable_gqa`, which torch 2.11 does not know and 2.13's flash kernel does not read.
    out, lse, _ = varlen._varlen_attn(*tensors, *bounds, is_causal=runs.causal)
    return out, lse


def _varlen_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    runs: Runs,
) -> Tensors:
    from torch.nn.attention import varlen

    tensors = [tensor.contiguous() for tensor in (grad_out, query, key, value, out, lse)]
    bounds = _bounds(runs, query.device)
    # The operator wants a dropout random state but does not read it without dropout.
    random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    result: Tensors = varlen._varlen_attn_backward(*tensors, *bounds, runs.causal, random_state)
    return result


_aten = torch.ops.aten
CPU = Kernel(
    _run_forward(
        lambda q, k, v, causal: _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal
        )
    ),
    _run_backward(
        lambda grad, q, k, v, out, lse, causal: (
            _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, causal
            )
        )
    ),
)
PLAIN = Kernel(_run_forward(_plain_forward), _run_backward(_plain_backward))
VARLEN = Kernel(_varlen_forward, _varlen_backward)
