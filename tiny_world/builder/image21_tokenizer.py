"""A byte-pair tokenizer with Qwen-Image-2.1's prompt, and Qwen3-VL's image processor."""

from __future__ import annotations

import random

from transformers import Qwen2Tokenizer, Qwen2VLImageProcessorPil

from tiny_world.builder.tokenizer import IMAGE, train
from tiny_world.scenes import COLOURS, SHAPES, clause, make_borrowing, make_instruction, make_scene

SYSTEM_PROMPT = "Comprehend and analyze the provided prompt."
SYSTEM_TURN = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n"
"""The pipeline drops the states of this part."""
USER = "<|im_start|>user\n"
PATCH_PX, MERGE = 16, 2


def mark_pictures(num: int) -> str:
    """The part of a prompt for `num` pictures."""
    return " ".join(f"<image{n}>{IMAGE}" for n in range(1, num + 1))


def editing_tokenizer() -> Qwen2Tokenizer:
    """Every word of the tiny world and of the real system prompt is one token."""
    rng, corpus = random.Random(0), [SYSTEM_PROMPT, "<image1> <image2>"] * 200
    for _ in range(2000):
        scene, other = make_scene(rng), make_scene(rng)
        corpus += [make_instruction(rng, scene).instruction]
        corpus += [make_borrowing(rng, scene, other).instruction]
        words = rng.choice(COLOURS), rng.choice(SHAPES), rng.choice((*COLOURS, None))
        corpus += [f"{clause(*words)} {clause(*words)}", f"a {words[0]} {words[1]}."]
        corpus += [f"what color is the {words[1]} in picture {n}. the {words[0]}." for n in (1, 2)]
        corpus += ["what is in picture 1", "what is in picture 2"]
    tokenizer = train(corpus)
    for text in ("turn", "remove", *(f" {word}" for word in (*COLOURS, *SHAPES, "the"))):
        assert len(tokenizer(text).input_ids) == 1, text
    return tokenizer


def image_processor(min_px: int = 32 * 32, max_px: int = 256 * 256) -> Qwen2VLImageProcessorPil:
    """Qwen3-VL's processor: an image token is 32x32 pixels, colours are in -1..1."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH_PX,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": min_px, "longest_edge": max_px},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
