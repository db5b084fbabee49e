"""The trainable nn.Module of a policy: log-probs and hidden states of a micro-batch.

Axes: `_B` rows, `_C` completion tokens, `_S` tokens of the packed row, `_N` completion tokens of
all rows together, `_4` the four indices of `completion_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl.algorithm.attention_kernels import choose_kernel
from rl.api.types import TokenBatch, TokenOutputs
from rl.meter import LanguageModel
from rl.policies.shared.logprobs import sliced_logprobs, token_logprobs
from rl.policies.shared.packed_attention import Packing
from rl.policies.shared.packing import completion_tokens

if TYPE_CHECKING:
    from rl.policies.shared.policy_base import TrainedPolicy


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
            bounds = self.vocabulary_slices
            return sliced_logprobs(hidden_ND, head, token_ids_N, self.temperature, bounds)
        banned = torch.tensor(self.banned_token_ids, dtype=torch.int64)
        ids_N, banned = (x.to(hidden_ND.device, non_blocking=True) for x in (token_ids_N, banned))
        return token_logprobs(hidden_ND, head, ids_N, self.temperature, banned)
