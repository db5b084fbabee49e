"""Renderer plugin: Qwen-Image-Edit, conditioned on the policy's hidden states."""

from __future__ import annotations

from rl.api.types import PromptTemplate
from rl.renderers.qwen_image.denoising_config import QwenImageConfig
from rl.renderers.qwen_image.qwen_image_editor import QwenImageEditor


class Config(QwenImageConfig):
    """`renderer: { type: 'qwen_image_edit', ... }`."""


class QwenImageEdit(QwenImageEditor[Config]):
    """Its text encoder reads the picture, then the instruction."""

    pipeline = "QwenImageEditPipeline"

    @classmethod
    def prompt_template(cls, config: Config) -> PromptTemplate:
        return cls.edit_template(config)
