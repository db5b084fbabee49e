"""Emu3's module: a head that gives one slice of the vocabulary, the one a token was drawn from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from rl.policies.shared.logprobs import sliced_logprobs
from rl.policies.shared.trained_module import TrainedModule

if TYPE_CHECKING:
    from rl.policies.shared.policy_base import TrainedPolicy


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


class Emu3Module(TrainedModule):
    """Around an `Emu3ForCausalLM` whose head is a `SlicedHead`."""

    def __init__(self, model: Any, policy: TrainedPolicy[Any], bounds: tuple[int, ...]) -> None:
        """`bounds`: of the vocabulary's slices, in which tokens have their own softmax; (): one
        softmax over all ids but the banned ones."""
        super().__init__(model, policy)
        self._bounds = bounds

    def logprobs(
        self, hidden_ND: torch.Tensor, token_ids_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._bounds:
            return super().logprobs(hidden_ND, token_ids_N)
        head = self.base_model.lm_head
        return sliced_logprobs(hidden_ND, head, token_ids_N, self.temperature, self._bounds)
