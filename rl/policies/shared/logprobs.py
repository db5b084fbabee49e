"""Log-probabilities and entropy of given tokens, without allocating [B, T, V].

Axes: `_N` completion tokens of a micro-batch, all rows together; `_V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rl.ranks.dist import calls_in_step

LOGITS_PER_CHUNK = 2**26
"""Tokens are projected in chunks of about this many logits: 256 MiB in float32."""


class SlicedHead(nn.Linear):
    """The vocabulary projection; it can compute the logits of only one slice of ids."""

    def __init__(self, weight: nn.Parameter) -> None:
        """`weight` [V, D] is used without a copy: a tied weight stays tied."""
        num_ids, width = weight.shape
        super().__init__(width, num_ids, bias=False, device="meta")
        self.weight = weight

    def forward(self, hidden: torch.Tensor, start: int = 0, end: int | None = None) -> torch.Tensor:
        """[..., D] -> [..., end - start] logits."""
        return functional.linear(hidden, self.weight[start:end])


def token_logprobs(
    hidden_ND: torch.Tensor,
    head: Any,
    token_ids_N: torch.Tensor,
    temperature: float,
    banned_ids: torch.Tensor,
    logits_per_chunk: int = LOGITS_PER_CHUNK,
    *,
    bounds: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi(token | before) with pi = softmax(logits / temperature) over the allowed ids.

    The softmax is float32 whatever the head's dtype: in bfloat16 most policy ratios come out as
    exactly 1. The backward recomputes each chunk's logits instead of keeping them.

    Args:
        hidden_ND: [N, D] states that predict each token, any float dtype.
        head: the vocabulary projection, D -> V, an nn.Linear. It is called as a module, so that
            sharded training can gather its weight.
        token_ids_N: [N] int64; none of them banned.
        temperature: > 0.
        banned_ids: [K] int64 ids left out of the softmax.
        logits_per_chunk: size of a chunk, in logits.
        bounds: (start, end) of the slice of ids over which the softmax runs; `head` is then a
            `SlicedHead`, and `token_ids_N` count from `start`.

    Returns:
        ([N] float32 log-probs in nats, differentiable; [N] float32 entropy in nats, detached).
    """

    def project(hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(hidden, *(bounds or ())).float() / temperature
        logits = logits.index_fill(-1, banned_ids, float("-inf"))
        logprobs = logits.log_softmax(-1)
        entropy = torch.special.entr(logprobs.detach().exp()).sum(-1)
        return logprobs.gather(-1, ids[:, None])[:, 0], entropy

    num_ids = bounds[1] - bounds[0] if bounds else head.out_features
    chunk = max(1, logits_per_chunk // num_ids)
    logprobs, entropies = [], []
    # At least one chunk, so that an input without tokens gives an empty result.
    num_chunks = calls_in_step(max(1, -(-len(token_ids_N) // chunk)), head)
    for start in range(0, chunk * num_chunks, chunk):
        hidden, ids = hidden_ND[start : start + chunk], token_ids_N[start : start + chunk]
        if torch.is_grad_enabled() and hidden.requires_grad:
            part = checkpoint(project, hidden, ids, use_reentrant=False, preserve_rng_state=False)
        else:
            part = project(hidden, ids)
        logprobs.append(part[0])
        entropies.append(part[1])
    return torch.cat(logprobs), torch.cat(entropies)


def sliced_logprobs(
    hidden_ND: torch.Tensor,
    head: SlicedHead,
    token_ids_N: torch.Tensor,
    temperature: float,
    bounds: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `token_logprobs`, but each token's softmax runs over the slice that contains the token.

    Slice i holds the ids from `bounds[i]` (included) to `bounds[i + 1]` (excluded); the slices
    cover all tokens. Each token costs only its slice's logits. The head is called for every slice,
    in order, even for empty ones, so that the ranks of a sharded run make the same calls.
    `token_ids_N` is on the CPU, so that the host need not wait for the slices' sizes.
    """
    device = hidden_ND.device
    logprobs_N = torch.zeros(len(token_ids_N), device=device)
    entropy_N = torch.zeros_like(logprobs_N)
    no_banned_ids = torch.empty(0, dtype=torch.int64, device=device)
    for start, end in pairwise(bounds):
        (members,) = ((start <= token_ids_N) & (token_ids_N < end)).nonzero(as_tuple=True)
        ids = (token_ids_N[members] - start).to(device, non_blocking=True)
        members = members.to(device, non_blocking=True)
        logprobs, entropy = token_logprobs(
            hidden_ND[members], head, ids, temperature, no_banned_ids, bounds=(start, end)
        )
        logprobs_N = logprobs_N.index_put((members,), logprobs)
        entropy_N = entropy_N.index_put((members,), entropy)
    return logprobs_N, entropy_N
