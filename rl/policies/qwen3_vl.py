"""Policy plug: Qwen3-VL (dense: 2B, 4B, 8B), whose states Qwen-Image-2.1 reads before the last
norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from rl.config.schema import MAX_COUNT
from rl.policies.qwen_vl import qwen_vl_config
from rl.policies.qwen_vl.qwen_vl_policy import QwenVL
from rl.policies.qwen_vl.tower import Tower

if TYPE_CHECKING:
    import torch


class Config(qwen_vl_config.Config):
    """The policy section."""

    image_max_pixels: Annotated[int, Field(ge=32 * 32, le=MAX_COUNT)] | None = None
    """Largest picture area the model sees, px; null = the processor's own."""
    max_kept_pictures: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 64
    """Pictures whose features (while the vision tower is frozen) and negative embeddings are kept
    on the device; features have four times the width of a state: each about 34 MB at 1024 x 1024
    px (8B). Fewer than a rank has prompts in an iteration: they are encoded again."""


class DeepstackTower(Tower):
    """Patches see their whole picture. Features of some layers go, each through a merger of its
    own, into the language model's first layers: a picture's are [N_img, D (1 + levels)], the last
    layer's first."""

    linear_layers = frozenset({"qkv", "proj", "linear_fc1", "linear_fc2"})

    def features(self, encoded: Any) -> Sequence[torch.Tensor]:
        import torch

        levels = (encoded.pooler_output, *encoded.deepstack_features)
        return [torch.cat(levels_of_one, dim=1) for levels_of_one in zip(*levels, strict=True)]

    def encoded(self, features: Sequence[torch.Tensor], config: Any) -> Any:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import (
            BaseModelOutputWithDeepstackFeatures,
        )

        num_levels = 1 + len(config.deepstack_visual_indexes)
        last, *others = zip(
            *(picture.chunk(num_levels, dim=1) for picture in features), strict=True
        )
        return BaseModelOutputWithDeepstackFeatures(pooler_output=last, deepstack_features=others)


class Qwen3VL(QwenVL[Config]):
    """Its prompts' M-RoPE interleaves its axes, and each head's queries and keys are normed, all of
    which is transformers' own affair."""

    model_types = frozenset({"qwen3_vl"})
    model_classes = frozenset({"Qwen3VLForConditionalGeneration"})
    state_kinds = frozenset({"post_norm", "pre_norm"})
    tower = DeepstackTower()
    slot_px = 32
