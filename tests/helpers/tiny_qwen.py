"""A tiny Qwen2.5-VL on disk with the classes, files and special tokens of the released one.

The tokenizer is trained on Qwen-Image-Edit's system prompt, so that this prefix has its real length
of 64 tokens. Random weights are so large that pictures and text have an effect.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny_models import draw, save
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

from rl.api.types import PromptTemplate, Sample
from tiny_world.builder.language import language_sizes, qwen_config
from tiny_world.builder.tokenizer import PREFIX, SUFFIX, SYSTEM_PROMPT, train

TEMPLATE = PromptTemplate(
    text=PREFIX + "{image}{instruction}" + SUFFIX, drop_prefix=PREFIX, image_area_px=96 * 96
)
WORDS = ["make the sky blue", "add a red square to the image", "turn the circle green"]
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "fullatt_block_indexes": [1],
    "tokens_per_second": 2,
}


def make_tokenizer() -> Any:
    """Byte-level BPE of a few hundred tokens with Qwen's pre-tokenizer and specials."""
    return train([SYSTEM_PROMPT] * 500 + WORDS * 50)


def make_model(tokenizer: Any, seed: int = 0, tied: bool = False) -> Any:
    """64 wide, two layers, heads of 32 (vLLM's CPU kernels have no smaller ones)."""
    torch.manual_seed(seed)
    config = qwen_config(tokenizer, text_sizes(tokenizer, tied), VISION)
    return draw(Qwen2_5_VLForConditionalGeneration(config))


def text_sizes(tokenizer: Any, tied: bool) -> dict[str, Any]:
    """Config of both families' language models, whose vocabulary is larger than the tokenizer."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}
    text = {"vocab_size": len(tokenizer) + 3, "rope_parameters": rope, "tie_word_embeddings": tied}
    return language_sizes(64, 2, 4096) | text


def save_policy_folder(folder: Path, tied: bool = False) -> str:
    """Writes weights, tokenizer and image processor for `policy.model_path`."""
    tokenizer = make_tokenizer()
    return save(folder, make_model(tokenizer, tied=tied), tokenizer, make_image_processor())


def make_image_processor() -> Any:
    """An image processor with 4 to 16 image tokens per picture."""
    return Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=112 * 112)


def make_processor() -> Any:
    """transformers' processor for diffusers' pipelines."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor

    return Qwen2_5_VLProcessor(
        image_processor=make_image_processor(),
        tokenizer=make_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(),
    )


class WithTokenTypes(torch.nn.Module):
    """A text encoder with the token types that diffusers' pipelines do not pass."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        types = (input_ids == self.model.config.image_token_id).long()
        return self.model(input_ids=input_ids, mm_token_type_ids=types, **inputs)


def picture(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    """Blocks of random colour."""
    blocks = np.random.RandomState(seed).randint(0, 255, (4, 4, 3))
    pixels = np.kron(blocks, np.ones((height // 4, width // 4, 1)))
    return Image.fromarray(pixels.astype("uint8"))


def sample(i: int, instruction: str | None = None, width: int = 64, height: int = 64) -> Sample:
    """Sample number `i`."""
    return Sample(f"s{i}", instruction or WORDS[i % 3], sources=(picture(i, width, height),))
