"""The trained module of a Qwen-VL: picture features, M-RoPE positions, pre-norm states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rl.api.types import Prompt, TokenBatch
from rl.policies.qwen_vl_prompts import Picture, PictureFeatures, Tower
from rl.policies.trained_module import TrainedModule


class QwenModule(TrainedModule):
    """Wraps a `...VLForConditionalGeneration`."""

    def __init__(self, model: Any, policy: Any) -> None:
        """`policy`: a `QwenVL`."""
        super().__init__(model, policy)
        tower_trained = any(p.requires_grad for p in self.base_model.model.visual.parameters())
        # In transformers, both methods make the host wait for the GPU: one checks that there are as
        # many features as picture tokens (the prompt ensures it), one indexes by booleans.
        vl_model = self.base_model.model
        vl_model.get_placeholder_mask = partial(_placeholder_masks, vl_model.config)
        if hasattr(vl_model.language_model, "_deepstack_process"):
            vl_model.language_model._deepstack_process = _add_at_pictures
        self._tower: Tower = policy.tower
        self._features = PictureFeatures(policy.tower, tower_trained)
        self._pre_norm = policy.setup.state_kind == "pre_norm"

    def states(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._pre_norm:
            return super().states(batch)
        norm_inputs: list[torch.Tensor] = []
        norm = self.base_model.model.language_model.norm
        hook = norm.register_forward_pre_hook(lambda _, args: norm_inputs.append(args[0][0]))
        try:
            post_SD, _ = super().states(batch)
        finally:
            hook.remove()
        [pre_SD] = norm_inputs
        return post_SD, pre_SD

    def encoded(self, batch: TokenBatch) -> Mapping[str, Any]:
        """The batch's picture features as `mm_encoder_outputs` of the forward; {} without any."""
        features = self._features.of(batch.model_inputs["pictures"], self.base_model)
        if features is None:
            return {}
        outputs = self._tower.encoded(features, self.base_model.config.vision_config)
        return {"mm_encoder_outputs": {"image": outputs}}

    @torch.no_grad()
    def picture_features(self, pictures: Sequence[Picture]) -> list[torch.Tensor]:
        """Features [N_img, W] of each picture, as the forward reads them. Not usable under ZeRO-3,
        because ranks may ask for different numbers of pictures."""
        return self._features.of(pictures, self.base_model) or []

    def prompt_positions(self, prompt: Prompt) -> torch.Tensor:
        """[3, P] M-RoPE positions on the CPU. Without token types transformers silently returns
        plain text positions, and log-probs are 1.28 nats off."""
        config, token_ids = self.base_model.config, torch.tensor(prompt.token_ids)
        positions, _ = self.base_model.model.get_rope_index(
            token_ids[None],
            mm_token_type_ids=(token_ids == config.image_token_id)[None].long(),
            image_grid_thw=prompt.model_inputs.get("image_grid_thw"),
        )
        return positions[:, 0]


def _placeholder_masks(
    config: Any, input_ids: torch.Tensor, inputs_embeds: torch.Tensor, **features: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two masks [B, S, 1] bool: of picture tokens, and of video tokens."""
    ids_BS1 = input_ids[..., None]
    return ids_BS1 == config.image_token_id, ids_BS1 == config.video_token_id


def _add_at_pictures(
    hidden_BSD: torch.Tensor, mask_BS: torch.Tensor, features_ND: torch.Tensor
) -> torch.Tensor:
    """Deepstack: all hidden states; at the picture tokens, a tower layer's features are added."""
    features_ND = features_ND.to(hidden_BSD.dtype)
    zeros_BSD = torch.zeros_like(hidden_BSD)
    return hidden_BSD + zeros_BSD.masked_scatter(mask_BS[..., None], features_ND)
