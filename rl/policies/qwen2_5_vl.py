"""Policy plugin: Qwen2.5-VL, whose last hidden states Qwen-Image-Edit reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rl.api.types import Completion, Prompt
from rl.policies.qwen_vl.qwen_vl_policy import EMPTY_COMPLETION, TEXT_POSITIONS, QwenVL


class Qwen25VL(QwenVL):
    model_types = frozenset({"qwen2_5_vl"})
    model_classes = frozenset({"Qwen2_5_VLForConditionalGeneration"})
    slot_px = 28

    def stock_arms(self, prompt: Prompt) -> Mapping[str, tuple[Prompt, Completion]]:
        """For edits, one arm has M-RoPE, as in training, and one has upstream's text positions."""
        arms = dict(super().stock_arms(prompt))
        if self.setup.kind != "text" and prompt.images:  # for text alone both are the same
            plain = prompt.plain
            inputs = {**plain.model_inputs, TEXT_POSITIONS: True}
            upstream = replace(plain, model_inputs=inputs)
            arms["stock_upstream"] = (upstream, EMPTY_COMPLETION)
        return arms
