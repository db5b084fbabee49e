"""Policy plugin: Qwen3-VL (dense), whose pre-norm hidden states Qwen-Image-2.1 reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl.policies.qwen_vl.qwen_vl_policy import QwenVL
from rl.policies.qwen_vl.qwen_vl_prompts import Tower

if TYPE_CHECKING:
    import torch


class DeepstackTower(Tower):
    """The language model's first layers also receive features of some tower layers, each through
    its own merger. A picture's features are [N_img, D (1 + levels)], the last layer's first."""

    linear_layers = frozenset({"qkv", "proj", "linear_fc1", "linear_fc2"})

    def geometry(self, grid: torch.Tensor, visual: Any) -> Mapping[str, torch.Tensor]:
        from transformers import vision_utils

        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=visual.config.spatial_merge_size,
        )
        positions = vision_utils.get_vision_position_ids(grid, visual.spatial_merge_size)
        return {"position_ids": positions, "interp_indices": indices, "interp_weights": weights}

    def features(self, encoded: Any) -> Sequence[torch.Tensor]:
        import torch

        levels = (encoded.pooler_output, *encoded.deepstack_features)
        return [torch.cat(picture_levels, dim=1) for picture_levels in zip(*levels, strict=True)]

    def encoded(self, features: Sequence[torch.Tensor], config: Any) -> Any:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import (
            BaseModelOutputWithDeepstackFeatures,
        )

        num_levels = 1 + len(config.deepstack_visual_indexes)
        last, *others = zip(
            *(picture.chunk(num_levels, dim=1) for picture in features), strict=True
        )
        return BaseModelOutputWithDeepstackFeatures(pooler_output=last, deepstack_features=others)


class Qwen3VL(QwenVL):
    model_types = frozenset({"qwen3_vl"})
    model_classes = frozenset({"Qwen3VLForConditionalGeneration"})
    state_kinds = frozenset({"post_norm", "pre_norm"})
    tower = DeepstackTower()
    slot_px = 32
