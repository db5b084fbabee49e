"""Model files from folders or hub ids, and the adapter around a loaded model.

What not: what is in the files, which layers are adapted (each policy's own loading), names and
files of adapters (`adapters.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.api.policy import LoraSection

TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Everything of a model's repository but weights and code."""


def local_folder(
    path: str, revision: str | None = None, patterns: Sequence[str] | None = None
) -> Path:
    """The folder itself, or the hub's files of those patterns, fetched where need be."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    allowed = None if patterns is None else list(patterns)
    return Path(snapshot_download(path, revision=revision, allow_patterns=allowed))


def link_files(folder: Path, overlay: Path, skip: Sequence[str] = ()) -> None:
    """Link every file whose name holds none of `skip`, unless the overlay has one of that name."""
    for file in folder.iterdir():
        link = overlay / file.name
        if file.is_file() and not link.exists() and not any(part in file.name for part in skip):
            link.symlink_to(file.resolve())


def adapt(
    model: Any, lora: LoraSection | None, adapter_path: str, within: str = "", seed: int = 0
) -> Any:
    """The model with a trainable LoRA, fresh or from `adapter_path`, on the layers that `lora`
    names, below what `within` (a regex) matches; without `lora`, all of the model to be trained.
    A fresh one is drawn from `lora.init_seed`, or from `seed` where that is None.

    Raises ValueError when `adapter_path` holds another shape than `lora` asks for.
    """
    if lora is None:
        return model.requires_grad_(True)
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    if adapter_path:
        adapted = PeftModel.from_pretrained(model, adapter_path, is_trainable=True)
        found = adapted.peft_config["default"]
        if (found.r, found.lora_alpha) != (lora.r, lora.alpha):
            raise ValueError(
                f"policy.adapter_path {adapter_path} has r={found.r} alpha="
                f"{found.lora_alpha}, policy.lora asks for r={lora.r} "
                f"alpha={lora.alpha}: make them equal"
            )
        return adapted
    names = list(lora.target_modules)
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=rf"{within}\.({'|'.join(names)})" if within else names,
    )
    with torch.random.fork_rng(devices=[]):
        # Every rank starts from the same adapter, whatever it drew before.
        torch.manual_seed(seed if lora.init_seed is None else lora.init_seed)
        return get_peft_model(model, config)
