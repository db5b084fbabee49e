"""Replaces a class of vLLM: Qwen3-VL without its vision tower."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.utils import StageMissingLayer

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
