"""Renderer plug: Qwen-Image-Edit-Plus (2509, 2511), conditioned on the policy's hidden states.

What: its template ("Picture 1: ...") and the 384^2 px picture its text encoder reads. What not:
several source pictures; 2511's `zero_cond_t`, which is in the transformer's own config; the rest,
shared with Edit (`qwen_image/`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl.api.types import PromptTemplate
from rl.config.schema import MAX_COUNT
from rl.renderers.qwen_image.config import QwenImageConfig
from rl.renderers.qwen_image.editor import QwenImageEditor


class Config(QwenImageConfig):
    """`renderer: { type: 'qwen_image_edit_plus', ... }`."""

    model_path: str = "Qwen/Qwen-Image-Edit-2511"
    """Hub id, or a local folder with `transformer/`, `vae/` and `scheduler/` (safetensors)."""
    policy_image_area_px: Annotated[int, Field(ge=32 * 32, le=MAX_COUNT)] = 384 * 384
    """Area of the source as the policy reads it, px^2."""


class QwenImageEditPlus(QwenImageEditor[Config]):
    """Its text encoder reads a small picture under its number, then the instruction."""

    pipeline = "QwenImageEditPlusPipeline"

    @classmethod
    def prompt_template(cls, config: Config) -> PromptTemplate:
        """The picture under its number, then the instruction."""
        return cls.edit_template(config, picture_label="Picture 1: ")
