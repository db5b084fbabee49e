"""Weights and tokenizer of an Emu3, in transformers' form or BAAI's, without running remote code.

BAAI's form has a custom `model_type` and a tiktoken vocabulary, but its weights have transformers'
names, and its tokenizer is byte-level BPE behind Qwen's split pattern.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.console.progress import weights_counted
from rl.files.adapter_base import Base
from rl.policies.shared import model_loading

if TYPE_CHECKING:
    from rl.policies.emu3.emu3_config import Config

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's: words, single digits, punctuation, white space."""
TEXT_SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{i}|>" for i in range(205)),
)
"""Special tokens between the byte pairs and the lines of the vision tokens' file, by id."""
TIKTOKEN_FILE, VISION_FILE = "emu3.tiktoken", "emu3_vision_tokens.txt"
TEXT_MODEL, PUBLISHED_MODEL = "emu3_text_model", "Emu3"
"""`model_type` of transformers' and of BAAI's configs."""
SAME_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "initializer_range",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
"""Keys of BAAI's config that transformers' has under the same name."""


def base(config: Config) -> Base:
    """The weights that training starts from."""
    return Base(config.model_path, config.revision)


def load_tokenizer(config: Config) -> Any:
    """From `tokenizer.json`, or from BAAI's tiktoken vocabulary. Raises ValueError when the folder
    holds neither."""
    from transformers import PreTrainedTokenizerFast

    path = config.tokenizer_path or config.model_path
    revision = None if config.tokenizer_path else config.revision
    folder = model_loading.local_folder(path, revision, model_loading.TEXT_FILES)
    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(folder)  # nosec B615 # a local folder
    if (folder / TIKTOKEN_FILE).is_file() and (folder / VISION_FILE).is_file():
        return PreTrainedTokenizerFast(
            tokenizer_object=_read_tiktoken(folder),
            bos_token="<|extra_203|>",
            eos_token="<|extra_204|>",
            pad_token="<|endoftext|>",
            clean_up_tokenization_spaces=False,
        )
    raise ValueError(
        f"policy.tokenizer_path: {path!r} holds neither tokenizer.json nor {TIKTOKEN_FILE} with "
        f"{VISION_FILE}; name the repository the model was trained with (BAAI/Emu3-Stage1)"
    )


def _read_tiktoken(folder: Path) -> Any:
    """The vocabulary as `tokenizers` takes it: byte pairs, text specials, vision tokens, by id."""
    from tokenizers import normalizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        """tiktoken's own reader keeps a copy by path, and would miss that a file has changed."""

        @staticmethod
        def load_tiktoken_bpe(path: str) -> dict[bytes, int]:
            lines = (line.split() for line in Path(path).read_bytes().split(b"\n"))
            return {base64.b64decode(token): int(rank) for token, rank in filter(None, lines)}

    vision = (folder / VISION_FILE).read_bytes().decode().split("\n")
    tokenizer = Converter(
        vocab_file=str(folder / TIKTOKEN_FILE),
        pattern=SPLIT_PATTERN,
        extra_special_tokens=[*TEXT_SPECIALS, *(line.strip() for line in vision if line.strip())],
    ).converted()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def read_model_config(folder: Path) -> Any:
    """`Emu3TextConfig` of a model folder of either form; dropout is 0, since the policy that
    samples has none. Raises ValueError for a `config.json` of anything else."""
    from transformers import Emu3TextConfig

    written = json.loads((folder / "config.json").read_text())
    model_type = written.get("model_type")
    if model_type == TEXT_MODEL:
        config = Emu3TextConfig.from_dict(written)
    elif model_type == PUBLISHED_MODEL:
        config = Emu3TextConfig(**{k: written[k] for k in SAME_FIELDS if k in written})
        config.rope_parameters = _rope(written)
    else:
        raise ValueError(
            f"policy.model_path: {folder} holds a {model_type!r}, not an Emu3 language model: "
            f"{TEXT_MODEL!r}, or {PUBLISHED_MODEL!r} as in BAAI/Emu3-Gen and BAAI/Emu3-Stage1"
        )
    config.architectures = ["Emu3ForCausalLM"]
    config.attention_dropout = 0.0
    return config


def _rope(written: dict[str, Any]) -> dict[str, Any]:
    scaling = dict(written.get("rope_scaling") or {"type": "default"})
    old_name = scaling.pop("type", None)
    rope_type = scaling.pop("rope_type", old_name)
    return {"rope_type": rope_type, "rope_theta": written.get("rope_theta", 1e6), **scaling}


def load_model(config: Config) -> Any:
    """`Emu3ForCausalLM` on the CPU, in the configured dtype, not yet adapted.

    Raises ValueError when the files lack weights.
    """
    import torch
    from transformers import Emu3ForCausalLM

    from rl.policies.shared.packed_attention import register

    folder = model_folder(config)
    with weights_counted():
        model, report = Emu3ForCausalLM.from_pretrained(  # nosec B615 # a local folder
            folder,
            config=read_model_config(folder),
            dtype=getattr(torch, config.dtype),
            attn_implementation=register(),
            use_safetensors=True,
            output_loading_info=True,
        )
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ValueError(
            f"policy.model_path: {config.model_path!r} lacks {len(missing)} weights of an Emu3 "
            f"({missing[0]}, ...)"
        )
    return model


def model_folder(config: Config) -> Path:
    """The folder of weights and texts, fetched where need be."""
    patterns = [*model_loading.TEXT_FILES, "*.safetensors"]
    return model_loading.local_folder(config.model_path, config.revision, patterns)


def adapt(model: Any, config: Config, seed: int = 0) -> Any:
    """The layers alone: the head is projected slice by slice, which an adapter could not be."""
    return model_loading.adapt(model, config.lora, config.adapter_path, r".*\.layers\..*", seed)
