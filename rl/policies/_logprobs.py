"""Log-probabilities and entropy of given tokens, without ever holding [B, T, V].

What: `token_logprobs`, float32, at the sampling temperature, over the vocabulary minus the banned
ids. What not: masking by row, the backbone. Called by the policies' modules.

Axes: `_N` completion tokens of a micro-batch, all rows together; `_V` vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LOGITS_PER_CHUNK = 2**26
"""Tokens are projected in chunks of about this many logits: 256 MiB in float32."""


def token_logprobs(
    hidden_ND: torch.Tensor,
    head: torch.nn.Linear,
    token_ids_N: torch.Tensor,
    temperature: float,
    banned_ids: torch.Tensor,
    logits_per_chunk: int = LOGITS_PER_CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi(token | before) with pi = softmax(logits / temperature) over the allowed ids.

    The softmax is float32 whatever the head's dtype: in bfloat16 most policy ratios come out as
    exactly 1. The backward recomputes each chunk's logits instead of keeping them.

    Args:
        hidden_ND: [N, D] states that predict each token, any float dtype.
        head: the vocabulary projection, D -> V; called as a module, so that sharded training can
            gather its weight.
        token_ids_N: [N] int64; none of them banned.
        temperature: > 0.
        banned_ids: [K] int64 ids left out of the softmax.
        logits_per_chunk: size of a chunk, in logits.

    Returns:
        ([N] float32 log-probs in nats, differentiable; [N] float32 entropy in nats, detached).
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    def project(hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(hidden).float() / temperature
        logits = logits.index_fill(-1, banned_ids, float("-inf"))
        logprobs = logits.log_softmax(-1)
        entropy = torch.special.entr(logprobs.detach().exp()).sum(-1)
        return logprobs.gather(-1, ids[:, None])[:, 0], entropy

    chunk = max(1, logits_per_chunk // head.out_features)
    logprobs, entropies = [], []
    for start in range(0, chunk * _num_chunks(len(token_ids_N), chunk, head), chunk):
        hidden, ids = hidden_ND[start : start + chunk], token_ids_N[start : start + chunk]
        if torch.is_grad_enabled() and hidden.requires_grad:
            part = checkpoint(project, hidden, ids, use_reentrant=False, preserve_rng_state=False)
        else:
            part = project(hidden, ids)
        logprobs.append(part[0])
        entropies.append(part[1])
    return torch.cat(logprobs), torch.cat(entropies)


def _num_chunks(num_tokens: int, chunk: int, head: torch.nn.Linear) -> int:
    """How often to call the head: at least once, and under ZeRO-3, where every call gathers its
    weight from all ranks, as often as the rank with the most tokens."""
    import torch

    num_chunks = max(1, -(-num_tokens // chunk))
    if not any(hasattr(parameter, "ds_id") for parameter in head.parameters()):
        return num_chunks
    largest = torch.tensor(num_chunks, device=next(head.parameters()).device)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return int(largest)
