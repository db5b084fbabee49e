"""Configs of the tiny language models, without the slow import of diffusers."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2_5_VLConfig


def language_sizes(
    hidden: int, num_layers: int, max_position_embeddings: int = 1024
) -> dict[str, Any]:
    """`hidden` is a multiple of 64: heads are 32 wide, and two heads share a key and a value."""
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": max_position_embeddings,
    }


def vocabulary(tokenizer) -> dict[str, int]:
    """A text model's config keys that depend on its tokenizer."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"vocab_size": len(tokenizer)} | {name: getattr(tokenizer, name) for name in names}


def special_tokens(tokenizer) -> tuple[dict[str, int], dict[str, int | None]]:
    """(Qwen-VL's config keys for picture tokens, those for begin, end and padding tokens)."""
    token_id = tokenizer.convert_tokens_to_ids
    pictures = {
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
    }
    ends = {
        "bos_token_id": None,
        "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": token_id("<|endoftext|>"),
    }
    return pictures, ends


def qwen_config(tokenizer, text: dict, vision: dict, family: type = Qwen2_5_VLConfig) -> Any:
    """A config of Qwen2.5-VL (or Qwen3-VL) with these sizes and that tokenizer; fills in the keys
    on which its text and vision parts must agree."""
    pictures, ends = special_tokens(tokenizer)
    text = {"vocab_size": len(tokenizer), "tie_word_embeddings": False, **text, **ends}
    return family(
        text_config=text,
        vision_config={"out_hidden_size": text["hidden_size"], **vision},
        tie_word_embeddings=text["tie_word_embeddings"],
        **pictures,
        **ends,
    )
