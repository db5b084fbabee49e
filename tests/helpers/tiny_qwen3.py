"""A tiny Qwen3-VL on disk, with the sizes, tokenizer and pictures of `tiny_qwen.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny_qwen
import torch
from tiny_models import draw, save
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tiny_world.builder.image21_tokenizer import image_processor
from tiny_world.builder.language import qwen_config

SEVERAL = replace(
    tiny_qwen.TEMPLATE,
    picture="<image{number}>{image}",
    between_pictures=" ",
    min_pictures=0,
    max_pictures=3,
)
VISION = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1, 2],
}


def make_model(tokenizer: Any, tied: bool = False) -> Any:
    """Four layers, of which the first three get deepstack features; three heads of 32 at a width of
    64, so that tests notice mistaken sizes; norms other than 1."""
    torch.manual_seed(0)
    text = tiny_qwen.text_sizes(tokenizer, tied)
    text |= {"num_hidden_layers": 4, "num_attention_heads": 3, "head_dim": 32}
    text["rope_parameters"] |= {"rope_theta": 5e6, "mrope_interleaved": True}
    config = qwen_config(tokenizer, text, VISION, Qwen3VLConfig)
    return draw(Qwen3VLForConditionalGeneration(config), vectors_std=0.3)


def save_policy_folder(folder: Path, tied: bool = False) -> str:
    """Writes weights, tokenizer and image processor for `policy.model_path`."""
    tokenizer = tiny_qwen.make_tokenizer()
    processor = image_processor(64 * 64, 128 * 128)  # 4 to 16 image tokens per picture
    return save(folder, make_model(tokenizer, tied), tokenizer, processor)
