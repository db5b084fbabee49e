"""A tiny, real Emu3 on disk: the class, files and special tokens of the big one.

The vocabulary is laid out as the published one: byte-level BPE, three Qwen specials, 205 extras,
the picture's three brackets, the codes. Random weights are scaled up so that every token visibly
matters.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, normalizers

from rl.api.types import Sample
from rl.ranks.wheels import mend_mismatched_wheels

mend_mismatched_wheels()

from transformers import (  # noqa: E402
    Emu3ForCausalLM,
    Emu3TextConfig,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: E402

from tiny_world.builder.tokenizer import byte_pairs  # noqa: E402

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
BRACKETS = ["<|image token|>", "<|image start|>", "<|image end|>"]
NUM_CODES = 64
WORDS = ["make the sky blue", "add a red square to the image", "turn the circle green"]
THINK = " Let's think step by step. <|start thinking|>"


def vision_tokens(num_codes: int = NUM_CODES) -> list[str]:
    """The lines of `emu3_vision_tokens.txt`."""
    return BRACKETS + [f"<|visual token {code:06d}|>" for code in range(num_codes)]


def make_bpe() -> Tokenizer:
    """A few hundred tokens, no specials."""
    bpe = byte_pairs([*WORDS * 5, *[THINK] * 5])
    bpe.normalizer = normalizers.NFC()
    return bpe


def make_tokenizer(num_codes: int = NUM_CODES) -> Any:
    """As transformers saves it (`tokenizer.json`)."""
    bpe = make_bpe()
    texts = SPECIALS + vision_tokens(num_codes)
    bpe.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in texts])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|extra_203|>",
        eos_token="<|extra_204|>",
        pad_token="<|endoftext|>",
    )


def text_config(tokenizer: Any, tied: bool = False) -> dict[str, Any]:
    """64 wide, two layers, heads of 32 (vLLM's CPU kernels have no smaller ones)."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def make_model(
    tokenizer: Any, seed: int = 0, tied: bool = False, fond_of_pictures: bool = False
) -> Any:
    """Keeps the default `attention_dropout` of 0.1, as the published configs do.

    `fond_of_pictures`: most completions come to a picture within a few words, which random weights
    rarely do; one dimension is large in every state, and speaks for the image token.
    """
    torch.manual_seed(seed)
    model = Emu3ForCausalLM(Emu3TextConfig(**text_config(tokenizer, tied))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
        if fond_of_pictures:
            model.model.embed_tokens.weight[:, 0] = 4.0
            model.lm_head.weight[tokenizer.convert_tokens_to_ids("<|image token|>"), 0] = 3.0
    return model


def save_policy_folder(
    folder: Path,
    seed: int = 0,
    tied: bool = False,
    num_codes: int = NUM_CODES,
    fond_of_pictures: bool = False,
) -> str:
    """Weights and `tokenizer.json`, as `policy.model_path` wants them."""
    tokenizer = make_tokenizer(num_codes)
    make_model(tokenizer, seed, tied, fond_of_pictures).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_published_folder(
    folder: Path, seed: int = 0, num_codes: int = NUM_CODES, fond_of_pictures: bool = False
) -> str:
    """The same model and vocabulary as BAAI's repositories hold them: a custom `model_type`, code
    that nobody may run, a tiktoken file and a list of vision tokens."""
    tokenizer = make_tokenizer(num_codes)
    make_model(tokenizer, seed, fond_of_pictures=fond_of_pictures).save_pretrained(folder)
    config = {
        **text_config(tokenizer),
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
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "configuration_emu3.py").write_text("raise RuntimeError('remote code was run')\n")
    tokenizer_config = {
        "auto_map": {"AutoTokenizer": ["tokenization_emu3.Emu3Tokenizer", None]},
        "tokenizer_class": "Emu3Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "tokenization_emu3.py").write_text("raise RuntimeError('remote code was run')\n")
    (folder / "emu3.tiktoken").write_text(_tiktoken_lines())
    (folder / "emu3_vision_tokens.txt").write_text("\n".join(vision_tokens(num_codes)) + "\n")
    return str(folder)


def _tiktoken_lines() -> str:
    """`base64(bytes) rank` by rank; the BPE trainer numbers its tokens in the order of merging."""
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    ranks = sorted(make_bpe().get_vocab().items(), key=lambda item: item[1])
    spelt = [(bytes(byte_of[letter] for letter in token), rank) for token, rank in ranks]
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in spelt)


def codes(seed: int, height: int = 4, width: int = 4, num_codes: int = NUM_CODES) -> np.ndarray:
    """[h, w] int32 random codebook indices."""
    drawn = np.random.RandomState(seed).randint(0, num_codes, (height, width))
    return drawn.astype(np.int32)


def sample(i: int, instruction: str | None = None, height: int = 4, width: int = 4) -> Sample:
    """Sample number `i`, its pictures as codes only."""
    return Sample(
        f"s{i}",
        instruction or WORDS[i % 3],
        source_codes=codes(i, height, width),
        target_codes=codes(1000 + i, height, width),
    )
