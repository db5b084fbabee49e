"""A byte-pair tokenizer with Qwen's special tokens and Qwen-Image-Edit's prompt."""

from __future__ import annotations

import json
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer, Qwen2VLImageProcessorPil
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from tiny_world.scenes import COLOURS, SHAPES, clause, make_instruction, make_scene

SYSTEM_PROMPT = (
    "Describe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. "
    "Generate a new image that meets the user's requirements while maintaining consistency with "
    "the original input where appropriate."
)
PREFIX = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
PREFIX_TOKENS = 64
SPECIALS = [
    *("<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type']=='image' or 'image' in c %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def editing_tokenizer() -> Qwen2Tokenizer:
    """Every word of the tiny world and of the real system prompt is one token, so that the part
    that the pipeline drops has 64 tokens as with the real tokenizer."""
    rng, corpus = random.Random(0), [SYSTEM_PROMPT] * 200
    for _ in range(2000):
        scene = make_scene(rng)
        corpus.append(make_instruction(rng, scene).instruction)
        words = rng.choice(COLOURS), rng.choice(SHAPES), rng.choice((*COLOURS, None))
        corpus.append(f"{clause(*words)} {clause(*words)}")
        corpus.append(f"a {words[0]} {words[1]}. what color is the {words[1]}. the {words[0]}.")
        corpus.append("what is in the picture")
    tokenizer = train(corpus)
    assert len(tokenizer(PREFIX).input_ids) == PREFIX_TOKENS
    for text in ("turn", "remove", *(f" {word}" for word in (*COLOURS, *SHAPES, "the"))):
        assert len(tokenizer(text).input_ids) == 1, text
    return tokenizer


def image_processor() -> Qwen2VLImageProcessorPil:
    """The image processor of every tiny Qwen2.5-VL."""
    size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
    return Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, temporal_patch_size=2, size=size)


def byte_pairs(corpus: list[str]) -> Tokenizer:
    """Byte-pair encoding of a corpus with Qwen's split into words, without special tokens."""
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    return bpe


def vision_tokens(num_codes: int) -> list[str]:
    """Emu3's special tokens: the lines of its `emu3_vision_tokens.txt`."""
    codes = [f"<|visual token {code:06d}|>" for code in range(num_codes)]
    return ["<|image token|>", "<|image start|>", "<|image end|>", *codes]


def emu3_tokenizer(bpe: Tokenizer, added: list[str]) -> PreTrainedTokenizerFast:
    """Byte pairs, then special tokens, as in the published vocabulary."""
    bpe.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|extra_203|>",
        eos_token="<|extra_204|>",
        pad_token="<|endoftext|>",
    )


def train(corpus: list[str], num_tokens: int = 0) -> Qwen2Tokenizer:
    """Byte pairs of the corpus and of a chat's roles, with Qwen's special tokens and template,
    padded with unused tokens to at least `num_tokens`."""
    bpe = byte_pairs(corpus + ["system\n", "user\n", "assistant\n"] * 200)
    learnt = json.loads(bpe.to_str())["model"]
    vocab, merges = learnt["vocab"], [tuple(merge) for merge in learnt["merges"]]
    vocab |= {f"unused{n}": n for n in range(len(vocab), num_tokens - len(SPECIALS) - 1)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, chat_template=CHAT_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS})
    tokenizer.pad_token, tokenizer.eos_token = "<|endoftext|>", "<|im_end|>"
    return tokenizer
