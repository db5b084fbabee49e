"""The one nn.Module of an Emu3 policy: a micro-batch in, log-probs and hidden states out.

What: `Emu3Module`, whose forward runs the backbone once and projects completion positions only,
each onto the slice of the vocabulary it was drawn from. What not: prompts, parsing, the loss, one
token at a time (`shared/decoder.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rl.api.types import TokenBatch, TokenOutputs
from rl.meter.flops import LanguageModel
from rl.policies.shared.attention_kernels import Kernel
from rl.policies.shared.cost import count_row
from rl.policies.shared.logprobs import completion_outputs, sliced_logprobs, token_logprobs
from rl.policies.shared.packing import Packing


class SlicedHead(nn.Linear):
    """The vocabulary projection, which can also give the logits of one slice of ids alone."""

    def __init__(self, weight: nn.Parameter) -> None:
        """`weight` [V, D] is taken as it is: a tied one stays tied."""
        num_ids, width = weight.shape
        super().__init__(width, num_ids, bias=False, device="meta")
        self.weight = weight

    def forward(self, hidden: torch.Tensor, start: int = 0, end: int | None = None) -> torch.Tensor:
        """[..., D] -> [..., end - start] logits."""
        return functional.linear(hidden, self.weight[start:end])


class Emu3Module(nn.Module):
    """Wraps a (PEFT) `Emu3ForCausalLM` whose head is a `SlicedHead`."""

    def __init__(
        self,
        model: Any,
        adapted: bool,
        temperature: float,
        banned_token_ids: tuple[int, ...],
        slice_bounds: tuple[int, ...] | None,
        kernel: Kernel,
        sizes: LanguageModel,
    ) -> None:
        """`slice_bounds`: of the vocabulary's slices, in which tokens have their own softmax; None:
        one softmax over all ids but the banned ones."""
        super().__init__()
        self.model = model
        self.adapted = adapted
        self.temperature = temperature
        self.banned_token_ids = banned_token_ids
        self.slice_bounds = slice_bounds
        self._kernel = kernel
        self.sizes = sizes

    @property
    def base_model(self) -> Any:
        """The transformers model inside; LoRA layers sit in it, so it is never stale."""
        return self.model.get_base_model() if self.adapted else self.model

    def forward(self, batch: TokenBatch) -> TokenOutputs:
        """See `TokenOutputs`. Forced tokens are attended to; their log-prob and entropy are exactly
        0, as the engine's are."""
        hidden_SD = self.backbone(batch).last_hidden_state[0]
        forced_BC = batch.model_inputs.get("forced")
        return completion_outputs(hidden_SD, batch, forced_BC, self._logprobs)

    def backbone(self, batch: TokenBatch, use_cache: bool = False) -> Any:
        """transformers' own outputs of the packed row."""
        outputs = self.base_model.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.model_inputs["position_ids"][None],
            packing=Packing(batch.groups, self._kernel),
            use_cache=use_cache,
        )
        count_row(self.sizes, batch.groups, outputs.last_hidden_state)
        return outputs

    def _logprobs(
        self, hidden_ND: torch.Tensor, token_ids_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = self.base_model.lm_head
        if self.slice_bounds is not None:
            return sliced_logprobs(
                hidden_ND, head, token_ids_N, self.temperature, self.slice_bounds
            )
        banned = torch.tensor(self.banned_token_ids, device=hidden_ND.device, dtype=torch.int64)
        return token_logprobs(hidden_ND, head, token_ids_N, self.temperature, banned)
