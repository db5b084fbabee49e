"""A tiny, real Qwen2.5-VL on disk: the classes, files and special tokens of the big one.

The tokenizer is trained on Qwen-Image-Edit's system prompt until that prefix has its real length,
64 tokens. Random weights are scaled up so that pictures and words visibly matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from rl.api.types import PromptTemplate, Sample
from rl.ranks.wheels import mend_mismatched_wheels

mend_mismatched_wheels()

from transformers import (  # noqa: E402
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from tiny_world.builder.tokenizer import PREFIX, SUFFIX, SYSTEM_PROMPT, train  # noqa: E402

TEMPLATE = PromptTemplate(
    text=PREFIX + "{image}{instruction}" + SUFFIX,
    drop_prefix=PREFIX,
    image_area_px=96 * 96,
)
WORDS = ["make the sky blue", "add a red square to the image", "turn the circle green"]


def make_tokenizer() -> Any:
    """Byte-level BPE of a few hundred tokens under Qwen's own pre-tokenizer and specials."""
    return train([SYSTEM_PROMPT] * 500 + WORDS * 50)


def make_model(tokenizer: Any, seed: int = 0, tied: bool = False) -> Any:
    """64 wide, two layers, heads of 32 (vLLM's CPU kernels have no smaller ones); as in the big
    one, the vocabulary is longer than the tokenizer."""
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(
        text_config=text_sizes(tokenizer, tied),
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        **vision_ids(tokenizer),
        **ends(tokenizer),
        tie_word_embeddings=tied,
    )
    return scaled_up(Qwen2_5_VLForConditionalGeneration(config).eval())


def text_sizes(tokenizer: Any, tied: bool) -> dict[str, Any]:
    """What both families' language models have."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}
    return dict(
        vocab_size=len(tokenizer) + 3,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        rope_parameters=rope,
        tie_word_embeddings=tied,
        **ends(tokenizer),
    )


def ends(tokenizer: Any) -> dict[str, Any]:
    id_of = tokenizer.convert_tokens_to_ids
    padding = id_of("<|endoftext|>")
    return {"bos_token_id": None, "eos_token_id": id_of("<|im_end|>"), "pad_token_id": padding}


def vision_ids(tokenizer: Any) -> dict[str, int]:
    names = ("image_pad", "video_pad", "vision_start", "vision_end")
    keys = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = tokenizer.convert_tokens_to_ids([f"<|{name}|>" for name in names])
    return dict(zip(keys, ids, strict=True))


def scaled_up(model: Any) -> Any:
    """Its matrices drawn so large that pictures and words matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.1 if "visual" in name else 0.15)
    return model


def save_policy_folder(folder: Path, seed: int = 0, tied: bool = False) -> str:
    """Weights, tokenizer and image processor, as `policy.model_path` wants them."""
    tokenizer = make_tokenizer()
    make_model(tokenizer, seed, tied).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    make_image_processor().save_pretrained(folder)
    return str(folder)


def make_image_processor() -> Any:
    """4 to 16 image tokens a picture."""
    return Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=112 * 112)


def picture(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    """Blocks of random colour."""
    blocks = np.random.RandomState(seed).randint(0, 255, (4, 4, 3))
    pixels = np.kron(blocks, np.ones((height // 4, width // 4, 1)))
    return Image.fromarray(pixels.astype("uint8"))


def sample(i: int, instruction: str | None = None, width: int = 64, height: int = 64) -> Sample:
    """Sample number `i`."""
    return Sample(f"s{i}", instruction or WORDS[i % 3], sources=(picture(i, width, height),))
