"""Renderer plugin: Qwen-Image-Edit, conditioned on the policy's hidden states."""

from __future__ import annotations

from rl.renderers.qwen_image.qwen_image_config import DenoisingConfig
from rl.renderers.qwen_image.qwen_image_editor import QwenImageEditor


class Config(DenoisingConfig):
    """`renderer: { type: 'qwen_image_edit', ... }`."""


class QwenImageEdit(QwenImageEditor[Config]):
    """Its text encoder reads the source picture, then the instruction."""

    pipeline = "QwenImageEditPipeline"
