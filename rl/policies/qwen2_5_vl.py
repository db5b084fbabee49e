"""Policy plug: Qwen2.5-VL, whose last hidden states Qwen-Image-Edit reads."""

from __future__ import annotations

from rl.policies.qwen_vl.config import Config
from rl.policies.qwen_vl.policy import QwenVL

__all__ = ["Config", "Qwen25VL"]


class Qwen25VL(QwenVL):
    """Windows in most layers of its tower, plain features behind it."""

    model_types = frozenset({"qwen2_5_vl"})
    model_classes = frozenset({"Qwen2_5_VLForConditionalGeneration"})
