"""Log-probabilities and entropy of given tokens, without ever holding [B, T, V].

Axes: `_N` completion tokens of a micro-batch, all rows together; `_V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from rl.ranks.sharded import calls_in_step

if TYPE_CHECKING:
    import torch

LOGITS_PER_CHUNK = 2**26
"""Tokens are projected in chunks of about this many logits: 256 MiB in float32."""


class Head(Protocol):
    """A vocabulary projection; a module's call, so that sharded training can gather its weight."""

    out_features: int

    def __call__(self, hidden: torch.Tensor, /) -> torch.Tensor:
        """[N, D] -> [N, out_features] logits."""
        ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...


def token_logprobs(
    hidden_ND: torch.Tensor,
    head: Head,
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
        head: the vocabulary projection, D -> V.
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
    # At least once: there is a result, if an empty one, without any token.
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
    head: Any,
    token_ids_N: torch.Tensor,
    temperature: float,
    bounds: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `token_logprobs`, where each token's softmax runs over its own slice of the vocabulary.

    Slice i holds the ids from `bounds[i]` (included) to `bounds[i + 1]` (not), and every token lies
    in one. Only that slice's logits are computed. `head(hidden, start, end)` gives them; it is
    called for every slice, in order, so that the ranks of a sharded run stay in step.
    """
    import torch

    logprobs_N = torch.zeros(len(token_ids_N), device=hidden_ND.device)
    entropy_N = torch.zeros_like(logprobs_N)
    nothing = torch.empty(0, dtype=torch.int64, device=hidden_ND.device)
    for start, end in pairwise(bounds):
        (members,) = ((start <= token_ids_N) & (token_ids_N < end)).nonzero(as_tuple=True)
        logprobs, entropy = token_logprobs(
            hidden_ND[members],
            _Slice(head, start, end),
            token_ids_N[members] - start,
            temperature,
            nothing,
        )
        logprobs_N = logprobs_N.index_put((members,), logprobs)
        entropy_N = entropy_N.index_put((members,), entropy)
    return logprobs_N, entropy_N


class _Slice:
    """Columns `start` to `end` of a head, as a head."""

    def __init__(self, head: Any, start: int, end: int) -> None:
        self._head = head
        self._start = start
        self.out_features = end - start

    def __call__(self, hidden: torch.Tensor, /) -> torch.Tensor:
        logits: torch.Tensor = self._head(hidden, self._start, self._start + self.out_features)
        return logits

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        parameters: Iterator[torch.nn.Parameter] = self._head.parameters()
        return parameters
