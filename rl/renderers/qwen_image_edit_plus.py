"""Renderer plugin: Qwen-Image-Edit-Plus (2509, 2511), conditioned on the policy's hidden states."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl.config.schema import MAX_COUNT
from rl.renderers.qwen_image.qwen_image_config import DenoisingConfig
from rl.renderers.qwen_image.qwen_image_editor import QwenImageEditor


class Config(DenoisingConfig):
    """`renderer: { type: 'qwen_image_edit_plus', ... }`."""

    model_path: str = "Qwen/Qwen-Image-Edit-2511"
    """Hub id, or a local folder with `transformer/`, `vae/` and `scheduler/` (safetensors)."""
    policy_image_area_px: Annotated[int, Field(ge=32 * 32, le=MAX_COUNT)] = 384 * 384
    """Area of each source as the policy reads it, px^2."""
    max_pictures: Annotated[int, Field(ge=1, le=16)] = 1
    """Limit of source pictures per sample, for which memory is planned. The model was trained on 1
    to 3. The output has the aspect ratio of the last source picture."""


class QwenImageEditPlus(QwenImageEditor[Config]):
    """Its text encoder reads numbered, downscaled source pictures, then the instruction."""

    pipeline = "QwenImageEditPlusPipeline"
    picture = "Picture {number}: {image}"

    @classmethod
    def max_pictures(cls, config: Config) -> int:
        return config.max_pictures
