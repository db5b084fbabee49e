"""Renderer plug: Qwen-Image-Edit-Plus (2509, 2511), conditioned on the policy's hidden states.

What: its template ("Picture 1: ...") and the 384^2 px picture its text encoder reads. What not:
several source pictures; 2511's `zero_cond_t`, which is in the transformer's own config; the rest,
shared with Edit (`qwen_image/`). Called by `build.py` and the check.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl.api.types import PromptTemplate
from rl.renderers.qwen_image.build import build
from rl.renderers.qwen_image.config import (
    ACCEPTS,
    MAKES_IMAGES,
    QwenImageConfig,
    activation_counts,
    edit_template,
    negative_prompt,
    parameter_counts,
    validate,
)

__all__ = [
    "ACCEPTS",
    "MAKES_IMAGES",
    "Config",
    "activation_counts",
    "build",
    "negative_prompt",
    "parameter_counts",
    "prompt_template",
    "validate",
]


class Config(QwenImageConfig):
    """`renderer: { type: 'qwen_image_edit_plus', ... }`."""

    model_path: str = "Qwen/Qwen-Image-Edit-2511"
    """Hub id, or a local folder with `transformer/`, `vae/` and `scheduler/` (safetensors)."""
    policy_image_area_px: Annotated[int, Field(ge=32 * 32)] = 384 * 384
    """Area of the source as the policy reads it, px^2."""


def prompt_template(config: Config) -> PromptTemplate:
    """The picture under its number, then the instruction."""
    return edit_template(config, picture_label="Picture 1: ")
