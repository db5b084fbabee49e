"""Renderer plug: Qwen-Image-Edit, conditioned on the policy's hidden states.

What: its template. What not: the rest of the contract and the loop, which it shares with Edit-Plus
(`qwen_image/`). Called by `build.py` and the config check.
"""

from __future__ import annotations

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
    """`renderer: { type: 'qwen_image_edit', ... }`."""


def prompt_template(config: Config) -> PromptTemplate:
    """The picture, then the instruction."""
    return edit_template(config, picture_label="")
