"""A tiny Emu3 on disk with the class, files and special tokens of the released one.

The vocabulary has the order of the published one: byte-level BPE, three Qwen specials, 205 extras,
three markers of a picture, the codes. Random weights are so large that every token has an effect.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import draw, save
from tokenizers import Tokenizer, normalizers
from transformers import Emu3ForCausalLM, Emu3TextConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rl.api.types import Sample
from tiny_world.builder.language import language_sizes, vocabulary
from tiny_world.builder.tokenizer import byte_pairs, emu3_tokenizer, vision_tokens

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
NUM_CODES = 64
WORDS = ["make the sky blue", "add a red square to the image", "turn the circle green"]
THINK = " Let's think step by step. <|start thinking|>"


def make_bpe() -> Tokenizer:
    """A few hundred tokens without specials."""
    bpe = byte_pairs([*WORDS * 5, *[THINK] * 5])
    bpe.normalizer = normalizers.NFC()
    return bpe


def make_tokenizer(num_codes: int = NUM_CODES) -> Any:
    """The tokenizer as transformers saves it (`tokenizer.json`)."""
    return emu3_tokenizer(make_bpe(), SPECIALS + vision_tokens(num_codes))


def text_config(tokenizer: Any, tied: bool) -> dict[str, Any]:
    """64 wide, two layers, heads of 32 (vLLM's CPU kernels have no smaller ones)."""
    return language_sizes(64, 2, 2048) | vocabulary(tokenizer) | {"tie_word_embeddings": tied}


def make_model(tokenizer: Any, tied: bool = False, fond_of_pictures: bool = False) -> Any:
    """Keeps the default `attention_dropout` of 0.1, as the published configs do.

    `fond_of_pictures`: most completions begin a picture within a few tokens, which random weights
    rarely do: one dimension is large in every state and raises the image token's logit.
    """
    torch.manual_seed(0)
    model = draw(Emu3ForCausalLM(Emu3TextConfig(**text_config(tokenizer, tied))))
    if fond_of_pictures:
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 0] = 4.0
            model.lm_head.weight[tokenizer.convert_tokens_to_ids("<|image token|>"), 0] = 2.0
    return model


def save_policy_folder(folder: Path, tied: bool = False, fond_of_pictures: bool = False) -> str:
    """Writes weights and `tokenizer.json` for `policy.model_path`."""
    tokenizer = make_tokenizer()
    return save(folder, make_model(tokenizer, tied, fond_of_pictures), tokenizer)


def save_published_folder(folder: Path, fond_of_pictures: bool = False) -> str:
    """Writes the same model and vocabulary as in BAAI's repositories: a custom `model_type`, code
    that must not be run, a tiktoken file and a list of vision tokens."""
    tokenizer = make_tokenizer()
    make_model(tokenizer, fond_of_pictures=fond_of_pictures).save_pretrained(folder)
    config = {
        **text_config(tokenizer, tied=False),
        "architectures": ["Emu3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_emu3.Emu3Config"},
        "model_type": "Emu3",
        "attention_dropout": 0.1,
        "hidden_act": "silu",
        "image_area": 518400,
        "img_token_id": tokenizer.convert_tokens_to_ids("<|image token|>"),
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "torch_dtype": "float32",
    }
    tokenizer_config = {
        "auto_map": {"AutoTokenizer": ["tokenization_emu3.Emu3Tokenizer", None]},
        "tokenizer_class": "Emu3Tokenizer",
    }
    files = {
        "config.json": json.dumps(config, indent=2),
        "tokenizer_config.json": json.dumps(tokenizer_config),
        "emu3.tiktoken": _tiktoken_lines(),
        "emu3_vision_tokens.txt": "\n".join(vision_tokens(NUM_CODES)) + "\n",
        "configuration_emu3.py": "raise RuntimeError('remote code was run')\n",
        "tokenization_emu3.py": "raise RuntimeError('remote code was run')\n",
    }
    for name, content in files.items():
        (folder / name).write_text(content)
    return str(folder)


def _tiktoken_lines() -> str:
    """Lines `base64(bytes) rank` by rank; the BPE trainer numbers tokens in order of merging."""
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    ranks = sorted(make_bpe().get_vocab().items(), key=lambda item: item[1])
    tokens = [(bytes(byte_of[letter] for letter in token), rank) for token, rank in ranks]
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in tokens)


def codes(seed: int, height: int = 4, width: int = 4) -> np.ndarray:
    """[h, w] int32 random codebook indices."""
    return np.random.RandomState(seed).randint(0, NUM_CODES, (height, width), np.int32)


def sample(i: int, instruction: str | None = None, height: int = 4, width: int = 4) -> Sample:
    """Sample number `i`, whose pictures are only codes."""
    return Sample(
        f"s{i}",
        instruction or WORDS[i % 3],
        source_codes=codes(i, height, width),
        target_codes=codes(1000 + i, height, width),
    )
