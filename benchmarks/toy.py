"""The models, samples and completions that both sides of a comparison work on.

What: `Shape`, a random Qwen2.5-VL (4 layers of 256) and Qwen-Image-Edit (DiT of 2 layers of 128, a
VAE of 16 channels) on disk as the released ones lie there, samples, and the completions that are
put into everybody's mouth. What not: either side. Prompts have 64 + 107 tokens and the picture's,
as the released editor's have 64 + 110. Called by the workers.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rl.api.types import Sample
from rl.ranks.wheels import mend_mismatched_wheels

STATE_DIM = 256
LORA = {"r": 32, "alpha": 64, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
MAX_ITERATIONS = 64
"""Rows of the toy data: no picture comes twice."""
INSTRUCTION_TOKENS = 100
DIGITS = "0123456789"
"""One token each and never merged, so that text and ids say the same whoever tokenises."""

SYSTEM = (
    "Describe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. "
    "Generate a new image that meets the user's requirements while maintaining consistency with "
    "the original input where appropriate."
)
STOP, PAD = "<|im_end|>", "<|endoftext|>"
SPECIALS = [PAD, "<|im_start|>", STOP, "<|vision_start|>", "<|vision_end|>"]
SPECIALS += ["<|image_pad|>", "<|video_pad|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's own, pictures first; with `SYSTEM` it spells the editor's template."""
SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
"""Config of the released editor's."""


@dataclass(frozen=True)
class Shape:
    """The size of one iteration's work."""

    group: int = 8
    """G, completions per prompt."""
    num_groups: int = 1
    """Prompts per iteration."""
    picture_px: int = 448
    """Side of the picture as the policy reads it: 256 image tokens, P = 427; 224: 64 and 235."""
    completion_tokens: int = 32
    """T, stop token included; the longest of a group where lengths differ."""
    ragged: bool = False
    """Lengths T/G, 2T/G ... T instead of T for all."""
    num_equal: int = 1
    """So many completions of a group are the same (1: none is repeated)."""
    render_px: int = 128
    """Side of source and picture in the renderer."""
    num_steps: int = 4
    """Of the DiT."""
    true_cfg_scale: float = 1.0
    """Above 1 there is a negative prompt."""

    def completion_lens(self) -> list[int]:
        """Tokens of each member of a group."""
        if not self.ragged:
            return [self.completion_tokens] * self.group
        return [max(2, self.completion_tokens * (g + 1) // self.group) for g in range(self.group)]


def make_sample(index: int, shape: Shape) -> Sample:
    """Row `index`: noise as a picture, digits as words."""
    rng = np.random.default_rng(index)
    pixels = rng.integers(0, 255, (shape.picture_px, shape.picture_px, 3), dtype=np.uint8)
    words = "".join(random.Random(index).choices(DIGITS, k=INSTRUCTION_TOKENS))
    return Sample(f"toy-{index}", words, sources=(Image.fromarray(pixels),))


def make_completions(instruction: str, shape: Shape) -> list[str]:
    """What the group of this prompt says, without the stop token."""
    rng = random.Random(f"{instruction}:completions")
    texts = ["".join(rng.choices(DIGITS, k=length - 1)) for length in shape.completion_lens()]
    return [*texts[:1] * shape.num_equal, *texts[shape.num_equal :]]


def completion_ids(tokenizer: Any, text: str) -> list[int]:
    """With the stop token."""
    return [*tokenizer(text, add_special_tokens=False).input_ids, stop_id(tokenizer)]


def stop_id(tokenizer: Any) -> int:
    """Of the end of a turn."""
    return int(tokenizer.convert_tokens_to_ids(STOP))


def save_models(folder: Path) -> None:
    """`policy/` and `editor/`, as `policy.model_path` and `renderer.model_path` want them."""
    mend_mismatched_wheels()
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "policy")
    make_image_processor().save_pretrained(folder / "policy")
    _make_policy(tokenizer).save_pretrained(folder / "policy")
    _save_editor(folder / "editor")


def make_tokenizer(num_tokens: int = 0) -> Any:
    """Byte-level BPE under Qwen's pre-tokenizer, in which the system prompt is 64 tokens long; at
    least `num_tokens` in all, those that no text comes to among them."""
    from transformers import Qwen2Tokenizer
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    roles = ["system\n", "user\n", "assistant\n"]
    bpe.train_from_iterator([SYSTEM] * 50 + roles * 20, trainer)
    trained = json.loads(bpe.to_str())["model"]
    vocab = trained["vocab"]
    for number in range(len(vocab), num_tokens - len(SPECIALS)):
        vocab[f"unused{number}"] = number
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[tuple(merge) for merge in trained["merges"]],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS[1:]})
    tokenizer.pad_token, tokenizer.eos_token = PAD, STOP
    return tokenizer


def make_image_processor() -> Any:
    """Pictures come to 4 tokens at least."""
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=1024 * 1024)


def _make_policy(tokenizer: Any) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    id_of = tokenizer.convert_tokens_to_ids
    ends = {"bos_token_id": None, "eos_token_id": id_of(STOP), "pad_token_id": id_of(PAD)}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    config = Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=len(tokenizer),
            hidden_size=STATE_DIM,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            rope_parameters=rope,
            tie_word_embeddings=False,
            **ends,
        ),
        vision_config={
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "out_hidden_size": STATE_DIM,
            "fullatt_block_indexes": [3],
            "window_size": 112,
            "patch_size": 14,
        },
        image_token_id=id_of("<|image_pad|>"),
        video_token_id=id_of("<|video_pad|>"),
        vision_start_token_id=id_of("<|vision_start|>"),
        vision_end_token_id=id_of("<|vision_end|>"),
        tie_word_embeddings=False,
        **ends,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def _save_editor(folder: Path) -> None:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImageTransformer2DModel,
    )

    torch.manual_seed(1)
    QwenImageTransformer2DModel(
        num_layers=2,
        num_attention_heads=4,
        attention_head_dim=32,
        joint_attention_dim=STATE_DIM,
        axes_dims_rope=(8, 12, 12),
    ).save_pretrained(folder / "transformer")
    AutoencoderKLQwenImage(base_dim=16).save_pretrained(folder / "vae")
    FlowMatchEulerDiscreteScheduler(**SCHEDULER).save_pretrained(folder / "scheduler")


def renderer_section(folder: Path, shape: Shape) -> dict[str, Any]:
    """The `renderer` of a config."""
    return {
        "type": "qwen_image_edit",
        "model_path": str(folder / "editor"),
        "dtype": "float32",
        "num_steps": shape.num_steps,
        "true_cfg_scale": shape.true_cfg_scale,
        "output_area_px": shape.render_px**2,
        "condition_area_px": shape.render_px**2,
        "policy_image_area_px": shape.picture_px**2,
        "batch_size": shape.group,
    }


class StockSampler:
    """transformers' own `generate` on a copy of the weights: what the rollout costs either side.

    Its words are thrown away for the injected ones; only its seconds count.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen2_5_VLForConditionalGeneration

        self._model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "policy").eval()

    @torch.no_grad()
    def sample(self, prompt_inputs: dict[str, torch.Tensor], shape: Shape) -> None:
        """`prompt_inputs`: of ONE prompt, [1, P] ids and its picture."""
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
