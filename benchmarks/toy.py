"""Tiny random models, samples and fixed completions for comparisons; also a data plugin.

A prompt has 64 + 107 text tokens (the released editor's has 64 + 110), and those of its picture.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import Field

from rl.api.types import Sample
from tiny_world.data.synthetic import SyntheticConfig, SyntheticSource

LORA = {"r": 32, "alpha": 64, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
MAX_ITERATIONS = 64
"""Iterations for which there are rows, so that no picture is used twice."""
INSTRUCTION_TOKENS = 100
DIGITS = "0123456789"
"""Characters of all texts. A digit is one token and never merged, so token counts are known."""
STOP = "<|im_end|>"
LANGUAGE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
}
VISION = {
    "depth": 4,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 4,
    "fullatt_block_indexes": [3],
}


@dataclass(frozen=True)
class Shape:
    """The sizes that determine the work of an iteration."""

    group: int = 8
    """G, completions per prompt."""
    num_groups: int = 1
    """Prompts per iteration."""
    picture_px: int = 448
    """Side of the picture that the policy reads. 448: 256 image tokens, P = 427; 224: 64, 235."""
    completion_tokens: int = 32
    """T, tokens of each completion, stop token included."""
    render_px: int = 128
    """Side of source and picture in the renderer."""
    num_steps: int = 4
    """Denoising steps."""


def make_sample(index: int, shape: Shape) -> Sample:
    """Row `index` of the data: a picture of noise, an instruction of digits."""
    rng = np.random.default_rng(index)
    pixels = rng.integers(0, 255, (shape.picture_px, shape.picture_px, 3), dtype=np.uint8)
    digits = "".join(random.Random(index).choices(DIGITS, k=INSTRUCTION_TOKENS))
    return Sample(f"toy-{index}", digits, sources=(Image.fromarray(pixels),))


class Config(SyntheticConfig):
    """Config of the data plugin."""

    shape: dict[str, Any] = Field(default_factory=dict)
    """Fields of `Shape`."""


class ToySamples(SyntheticSource[Config]):
    """The data plugin; a row depends only on the shape and the row's index."""

    carries = frozenset({"source"})

    def make(self, index: int) -> Sample:
        return make_sample(index, Shape(**self.config.shape))


def make_completions(instruction: str, shape: Shape) -> list[str]:
    """The fixed completions of a group for this prompt, without the stop token."""
    rng = random.Random(f"{instruction}:completions")
    num_digits = shape.completion_tokens - 1
    return ["".join(rng.choices(DIGITS, k=num_digits)) for _ in range(shape.group)]


def completion_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids with the stop token."""
    stop_id = int(tokenizer.convert_tokens_to_ids(STOP))
    return [*tokenizer(text, add_special_tokens=False).input_ids, stop_id]


def save_models(folder: Path) -> None:
    """Writes the models to `policy/` and `editor/`."""
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler
    from transformers import Qwen2_5_VLForConditionalGeneration

    from tiny_world.builder.language import qwen_config
    from tiny_world.builder.models import SCHEDULER, make_transformer

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    policy = Qwen2_5_VLForConditionalGeneration(qwen_config(tokenizer, LANGUAGE, VISION))
    for part in (tokenizer, make_image_processor(), policy):
        part.save_pretrained(folder / "policy")
    torch.manual_seed(1)
    editor = {
        "transformer": make_transformer(2, channels=16, text_width=LANGUAGE["hidden_size"]),
        "vae": AutoencoderKLQwenImage(base_dim=16),
        "scheduler": FlowMatchEulerDiscreteScheduler(**SCHEDULER),
    }
    for name, part in editor.items():
        part.save_pretrained(folder / "editor" / name)


def make_tokenizer(num_tokens: int = 0) -> Any:
    """The tiny world's tokenizer with at least `num_tokens` tokens. It is trained on the editor's
    system prompt, which then has 64 tokens."""
    from tiny_world.builder.tokenizer import SYSTEM_PROMPT, train

    return train([SYSTEM_PROMPT] * 50, num_tokens)


def make_image_processor() -> Any:
    """An image processor with at least 4 tokens per picture."""
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=1024 * 1024)


def renderer_section(folder: Path, shape: Shape) -> dict[str, Any]:
    """The config section `renderer` for the editor in `folder`."""
    return {
        "type": "qwen_image_edit",
        "model_path": str(folder / "editor"),
        "dtype": "float32",
        "num_steps": shape.num_steps,
        "true_cfg_scale": 1.0,
        "output_area_px": shape.render_px**2,
        "condition_area_px": shape.render_px**2,
        "policy_image_area_px": shape.picture_px**2,
        "batch_size": shape.group,
    }


class StockSampler:
    """Samples with transformers' `generate` on a copy of the weights, for the cost of a rollout in
    any setup. Its completions are not used; training uses the fixed ones."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen2_5_VLForConditionalGeneration

        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(  # nosec B615 # local
            folder / "policy"
        )
        self._model = model.eval()

    @torch.no_grad()
    def sample(self, prompt_inputs: dict[str, torch.Tensor], shape: Shape) -> None:
        """Samples a group. `prompt_inputs`: inputs of one prompt, [1, P] ids and its picture."""
        repeated = {
            name: tensor.repeat(shape.group, *[1] * (tensor.ndim - 1))
            for name, tensor in prompt_inputs.items()
        }
        self._model.generate(
            **repeated,
            do_sample=True,
            max_new_tokens=shape.completion_tokens,
            min_new_tokens=shape.completion_tokens,
        )
