"""Policy plug: Qwen2.5-VL, whose last hidden states Qwen-Image-Edit reads."""

from __future__ import annotations

from collections.abc import Mapping

from rl.api.types import Completion, Prompt
from rl.policies.qwen_vl.qwen_vl_config import Config
from rl.policies.qwen_vl.qwen_vl_policy import NOTHING_WRITTEN, QwenVL
from rl.policies.qwen_vl.tower import Tower

__all__ = ["Config", "Qwen25VL"]


class WindowedTower(Tower):
    """Patches see their window, in some layers their whole picture; its MLPs are gated."""

    linear_layers = frozenset({"qkv", "proj"})


class Qwen25VL(QwenVL[Config]):
    """Plain features behind its tower."""

    model_types = frozenset({"qwen2_5_vl"})
    model_classes = frozenset({"Qwen2_5_VLForConditionalGeneration"})
    tower = WindowedTower()
    slot_px = 28

    def stock_arms(self, prompt: Prompt) -> Mapping[str, tuple[Prompt, Completion]]:
        """An editor is asked with M-RoPE, as it was trained, and as upstream's pipeline does."""
        arms = dict(super().stock_arms(prompt))
        if self.setup.kind != "text" and prompt.images:  # plain text's positions are the same
            upstream = self.prompts.with_text_positions(prompt.plain)
            arms["stock_upstream"] = (upstream, NOTHING_WRITTEN)
        return arms
