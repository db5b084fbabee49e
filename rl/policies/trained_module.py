"""The trained module, and log-probs in float32 without a [B, T, V] tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rl.algorithm.attention_kernels import choose_kernel
from rl.api.types import TokenBatch, TokenOutputs
from rl.meter import LanguageModel
from rl.policies.attention import Packing
from rl.policies.packing import completion_tokens
from rl.ranks.dist import calls_in_step

if TYPE_CHECKING:
    from rl.policies.policy_base import TrainedPolicy

# ---- logprobs ------------------------------------------------------------------------------------
# Log-probabilities and entropy of given tokens, without allocating [B, T, V].
#
# Axes: `_N` completion tokens of a micro-batch, all rows together; `_V` vocabulary.

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


# ---- trained module ------------------------------------------------------------------------------
# The trainable nn.Module of a policy: log-probs and hidden states of a micro-batch.
#
# Axes: `_B` rows, `_C` completion tokens, `_S` tokens of the packed row, `_N` completion tokens of
# all rows together, `_4` the four indices of `completion_tokens`.


class TrainedModule(nn.Module):
    """Wraps a (PEFT) transformers model with an `lm_head` (a `SlicedHead` where the policy has
    `vocabulary_slices`)."""

    def __init__(self, model: Any, policy: TrainedPolicy[Any]) -> None:
        """Raises ValueError if the configured attention kernel cannot run on this device."""
        super().__init__()
        config, setup = policy.config, policy.setup
        self.model = model
        self.adapted = config.lora is not None
        self.temperature = setup.temperature
        self.banned_token_ids = policy.banned_token_ids
        self.vocabulary_slices = policy.vocabulary_slices
        dtype = getattr(torch, config.dtype)
        self._kernel = choose_kernel(config.attn_implementation, policy.device, dtype)
        text_config = self.base_model.config.get_text_config()
        self.sizes = LanguageModel.of(text_config, config.lora)

    @property
    def base_model(self) -> Any:
        """The transformers model without PEFT's wrapper, LoRA layers included."""
        return self.model.get_base_model() if self.adapted else self.model

    def forward(self, batch: TokenBatch) -> TokenOutputs:
        """Log-probs and entropy are 0 for padding and for forced tokens, as in the engine. Later
        tokens attend to forced tokens."""
        post_SD, hidden_SD = self.states(batch)
        lens_B = [length for group in batch.groups for length in group.completion_lens]
        tokens_4N = completion_tokens(batch.groups)
        if "forced" in batch.model_inputs:
            tokens_4N = tokens_4N[:, ~batch.model_inputs["forced"][tokens_4N[0], tokens_4N[1]]]
        ids_N = batch.model_inputs["ids_on_host"][tokens_4N[2]]
        tokens_4N = tokens_4N.to(hidden_SD.device, non_blocking=True)
        rows_N, columns_N, _, predictors_N = tokens_4N
        logprobs_N, entropy_N = self.logprobs(post_SD[predictors_N], ids_N)
        zeros_BC = torch.zeros(len(lens_B), max(lens_B), device=hidden_SD.device)
        return TokenOutputs(
            logprobs=zeros_BC.index_put((rows_N, columns_N), logprobs_N),
            entropy=zeros_BC.index_put((rows_N, columns_N), entropy_N),
            hidden=hidden_SD,
        )

    def states(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """([S, D] post-norm states for the head, [S, D] states of the kind `setup.state_kind` for
        the renderer)."""
        post_SD: torch.Tensor = self.backbone(batch).last_hidden_state[0]
        return post_SD, post_SD

    def backbone(self, batch: TokenBatch, use_cache: bool = False) -> Any:
        """transformers' outputs for the packed row; `last_hidden_state` is [1, S, D] post-norm."""
        return self.base_model.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.model_inputs["position_ids"].unsqueeze(-2),
            packing=Packing(batch.groups, self._kernel),
            use_cache=use_cache,
            **self.encoded(batch),
        )

    def encoded(self, batch: TokenBatch) -> Mapping[str, Any]:
        """The backbone's inputs other than ids and positions."""
        return {}

    def logprobs(
        self, hidden_ND: torch.Tensor, token_ids_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropy [N] of tokens (on the CPU), given the states that predict them."""
        head = self.base_model.lm_head
        if self.vocabulary_slices:
            return sliced_logprobs(
                hidden_ND, head, token_ids_N, self.temperature, self.vocabulary_slices
            )
        banned = torch.tensor(self.banned_token_ids, dtype=torch.int64)
        ids_N, banned = (x.to(hidden_ND.device, non_blocking=True) for x in (token_ids_N, banned))
        return token_logprobs(hidden_ND, head, ids_N, self.temperature, banned)
