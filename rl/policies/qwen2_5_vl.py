"""Policy plug: Qwen2.5-VL, whose last hidden states Qwen-Image-Edit reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl.api.types import Completion, Prompt
from rl.policies.qwen_vl.config import Config
from rl.policies.qwen_vl.policy import NOTHING_WRITTEN, QwenVL
from rl.policies.qwen_vl.tower import Tower

__all__ = ["Config", "Qwen25VL"]


class WindowedTower(Tower):
    """Patches see their window, in some layers their whole picture; its MLPs are gated."""

    linear_layers = frozenset({"qkv", "proj"})
    mlp_matrices = 3

    def num_pairs(self, config: Any, rows: int, columns: int) -> int:
        merge, num_full = config.spatial_merge_size, len(config.fullatt_block_indexes)
        side = config.window_size // config.patch_size // merge
        windows = _squares(rows // merge, side) * _squares(columns // merge, side)
        whole: int = num_full * (rows * columns) ** 2
        return whole + (config.depth - num_full) * windows * int(merge) ** 4


def _squares(length: int, window: int) -> int:
    """Sum of the squared sizes of the windows that a side is cut into."""
    full, rest = divmod(length, window)
    return full * window**2 + rest**2


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
