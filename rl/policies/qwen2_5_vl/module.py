"""The one nn.Module of a Qwen2.5-VL policy: a micro-batch in, log-probs and hidden states out.

What: `QwenModule`, whose forward runs the backbone once and projects completion positions only.
Everything happens inside that forward, so that ZeRO can wrap the module. What not: prompts,
parsing, the loss, which pictures are encoded anew (`pictures.py`), one token at a time
(`shared/decoder.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rl.api.types import TokenBatch, TokenOutputs
from rl.meter.flops import LanguageModel
from rl.policies.qwen2_5_vl.pictures import Picture, PictureFeatures
from rl.policies.shared.attention_kernels import Kernel
from rl.policies.shared.cost import count_row
from rl.policies.shared.logprobs import completion_outputs, token_logprobs
from rl.policies.shared.packing import Packing


class QwenModule(nn.Module):
    """Wraps a (PEFT) `Qwen2_5_VLForConditionalGeneration`."""

    def __init__(
        self,
        model: Any,
        adapted: bool,
        temperature: float,
        banned_token_ids: tuple[int, ...],
        kernel: Kernel,
        max_kept_pictures: int,
        sizes: LanguageModel,
    ) -> None:
        super().__init__()
        self.model = model
        self.adapted = adapted
        self.temperature = temperature
        self.banned_token_ids = banned_token_ids
        self._kernel = kernel
        tower_trained = any(p.requires_grad for p in self.base_model.model.visual.parameters())
        self._features = PictureFeatures(tower_trained, max_kept_pictures)
        self.sizes = sizes

    @property
    def base_model(self) -> Any:
        """The transformers model inside; LoRA layers sit in it, so it is never stale."""
        return self.model.get_base_model() if self.adapted else self.model

    def forward(self, batch: TokenBatch) -> TokenOutputs:
        """See `TokenOutputs`."""
        hidden_SD = self.backbone(batch).last_hidden_state[0]
        return completion_outputs(hidden_SD, batch, None, self._logprobs)

    def backbone(self, batch: TokenBatch, use_cache: bool = False) -> Any:
        """transformers' own outputs of the packed row, [1, S, D] post-norm."""
        encoded = {}
        features = self._features.of(batch.model_inputs["pictures"], self.base_model)
        if features is not None:
            encoded["mm_encoder_outputs"] = {"image": _as_encoded(features)}
        outputs = self.base_model.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.model_inputs["position_ids"][:, None],
            packing=Packing(batch.groups, self._kernel),
            use_cache=use_cache,
            **encoded,
        )
        count_row(self.sizes, batch.groups, outputs.last_hidden_state)
        return outputs

    @torch.no_grad()
    def picture_features(self, pictures: Sequence[Picture]) -> list[torch.Tensor]:
        """Each picture's [N_img, D], those that the forwards read; any number of pictures. Not
        collective, hence not under ZeRO-3."""
        return self._features.of(pictures, self.base_model) or []

    def prompt_positions(self, token_ids: torch.Tensor, grid: torch.Tensor | None) -> torch.Tensor:
        """[3, P] M-RoPE positions of a prompt's ids [P] with pictures of `grid` [n, 3], both on
        the CPU. Without token types transformers silently gives plain ones, 1.28 nats off."""
        config = self.base_model.config
        positions, _ = self.base_model.model.get_rope_index(
            token_ids[None],
            mm_token_type_ids=(token_ids == config.image_token_id)[None].long(),
            image_grid_thw=grid,
        )
        return positions[:, 0]

    def _logprobs(
        self, hidden_ND: torch.Tensor, token_ids_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        banned = torch.tensor(self.banned_token_ids, device=hidden_ND.device, dtype=torch.int64)
        head = self.base_model.lm_head
        return token_logprobs(hidden_ND, head, token_ids_N, self.temperature, banned)


def _as_encoded(features: list[torch.Tensor]) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(pooler_output=tuple(features))
