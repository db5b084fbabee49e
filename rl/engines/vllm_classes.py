"""Replaces two classes of vLLM: LoRA on a CPU, and Qwen3-VL without its vision tower."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.utils import StageMissingLayer

# ---- one adapter ---------------------------------------------------------------------------------
# LoRA on a CPU for an engine with one adapter: two matrix products a layer.

SLOT = 0
"""Slot of the policy's adapter, the only one; zeros until it is loaded."""


class OneAdapter(PunicaWrapperCPU):
    """Every token of every request goes through the adapter in the only slot. vLLM's class copies A
    and B once per token (quickstart, 96 completions: 0.59 CPU s instead of 0.22)."""

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """y[:, slice] += (x A^T scale) B^T for each of a fused layer's slices, in place. As in
        vLLM's kernels, A's product is float32.

        x [tokens, in], y [tokens, out], A [slots, 1, r, in], B [slots, 1, slice, r].
        """
        x32 = x.view(-1, x.shape[-1]).float()
        slices = y.view(-1, y.shape[-1]).split(output_slices, dim=1)
        for part, a, b in zip(slices, lora_a_stacked, lora_b_stacked, strict=True):
            low_rank = x32 @ a[SLOT, 0].float().T * scale
            part += low_rank.to(part.dtype) @ b[SLOT, 0].to(part.dtype).T


# ---- deepstack -----------------------------------------------------------------------------------
# Qwen3-VL in vLLM without a vision tower: picture features, deepstack's included, are inputs.


class Qwen3VLWithDeepstack(Qwen3VLForConditionalGeneration):
    """Same as vLLM's own class if the engine has the vision tower.

    Without the tower, vLLM's own class also disables deepstack, although the language model is what
    adds the deepstack features. Features of hidden-state width then give wrong log-probs (1 nat
    off), and features with deepstack crash the engine. `start.py` registers this class with vLLM
    before a model is built, so that CUDA graphs are captured with the buffers in place."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "model") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if not isinstance(self.visual, StageMissingLayer):
            return
        config = vllm_config.model_config.hf_config
        size = (vllm_config.scheduler_config.max_num_batched_tokens, config.text_config.hidden_size)
        self.use_deepstack = True
        self.deepstack_num_level = len(config.vision_config.deepstack_visual_indexes)
        self.multiscale_dim = self.visual_dim * self.deepstack_num_level
        self.deepstack_input_embeds = [torch.zeros(size) for _ in range(self.deepstack_num_level)]
        self.deepstack_input_embeds_num_tokens = 0
