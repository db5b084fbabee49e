"""Writes and reads the keys of `adapter_config.json` (PEFT) that name an adapter's base model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config import formats
from rl.files.atomic import read_object

ADAPTER_CONFIG = "adapter_config.json"
NAME, MAPPING = "base_model_name_or_path", "auto_mapping"
"""Loaders pass the value of `NAME` to the hub as it is, so it must be a folder or a hub id."""
SUBFOLDER, WORDS, FORMAT = "base_model_subfolder", "base_model_tokenizer", "format"
"""Keys of ours in `auto_mapping`. PEFT 0.21 ignores them there; elsewhere it logs a warning."""

PLAIN: dict[str, Any] = {
    "peft_type": "LORA", "bias": "none", "modules_to_save": None, "rank_pattern": {},
    "alpha_pattern": {}, "use_rslora": False, "use_dora": False, "lora_bias": False,
    "trainable_token_indices": None, "target_parameters": None, "layer_replication": None,
}  # fmt: skip
"""A LoRA on linear layers that are all scaled by alpha / r: what policy and engine compute."""


@dataclass(frozen=True)
class Base:
    """The untrained weights under an adapter."""

    path: str
    revision: str | None = None
    subfolder: str = ""
    """Inside a hub repository; for a folder it is part of the path."""
    words: str = ""
    """Folder or hub id of tokenizer and image processor; '' = the same."""

    @classmethod
    def of_editor(cls, editor: str, subfolder: str, words: str) -> Base:
        if Path(editor).is_dir():
            return cls(f"{editor.rstrip('/')}/{subfolder}", words=words)
        return cls(editor, subfolder=subfolder, words=words)


def noted(base: Base, model_class: str) -> dict[str, Any]:
    """The keys of an adapter_config.json that name its base, a transformers `model_class`. The
    task type is None: with one, PEFT's Auto classes would load a class that reads no pictures."""
    our_keys = {SUBFOLDER: base.subfolder, WORDS: base.words, FORMAT: formats.ADAPTER}
    return {
        NAME: base.path,
        "revision": base.revision,
        "task_type": None,
        MAPPING: {
            "base_model_class": model_class,
            "parent_library": "transformers",
            **{key: value for key, value in our_keys.items() if value},
        },
    }


def read_config(adapter: Path) -> dict[str, Any]:
    """The adapter_config.json of a folder. Raises ValueError for a damaged or newer one, and for
    an adapter that is no plain LoRA."""
    file = adapter / ADAPTER_CONFIG
    config = read_object(file)
    if config is None:
        raise ValueError(f"{file} is damaged: it holds no JSON object")
    if config.get("megatron_config"):  # PEFT then imports the module that the file names
        raise ValueError(f"{file} names megatron_config, which is not supported; remove it")
    odd = [key for key, plain in PLAIN.items() if config.get(key) and config[key] != plain]
    if odd:
        found = ", ".join(f"{key}: {config[key]!r:.80}" for key in odd)
        remedy = "merge it into its base model (PEFT's `merge_and_unload`), and start from that"
        if odd == ["use_rslora"]:
            alpha = config.get("lora_alpha", 8) * config.get("r", 8) ** 0.5
            remedy = f"set use_rslora to false and lora_alpha to {alpha:g}, which is the same"
        raise ValueError(f"{file} is of no plain LoRA ({found}); {remedy}")
    mapping = config.get(MAPPING)
    number = mapping.get(FORMAT, 1) if isinstance(mapping, Mapping) else 1
    if problem := formats.refusal(str(file), number, formats.ADAPTER):
        raise ValueError(problem)
    return config


def is_hub_id(path: str) -> bool:
    """Whether `path` is a valid id of a hub repository and no local path has this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return not path.startswith("~") and not Path(path).exists()
