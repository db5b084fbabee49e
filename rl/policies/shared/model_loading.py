"""Model files from folders or hub ids, and the adapter around a loaded model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rl.api.policy import LoraSection
from rl.console.console import warn
from rl.files.adapter_base import ADAPTER_CONFIG, read_config
from rl.text.untrusted import shown

TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Everything of a model's repository but weights and code."""


def local_folder(
    path: str, revision: str | None = None, patterns: Sequence[str] | None = None
) -> Path:
    """`path` if a folder, else a folder with the hub's files that match `patterns`, downloaded."""
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
    names, inside the modules that `within` (a regex) matches ('' = anywhere); without `lora`, all
    of the model is trained. A fresh LoRA is initialised with the seed `lora.init_seed`, or `seed`
    where that is None.

    Raises ValueError when `lora.target_modules` has a name that no layer has, or when
    `adapter_path` holds tensors for other layers. The model must still be on the CPU.
    """
    if lora is None:
        return model.requires_grad_(True)
    if adapter_path:
        return _with_saved_adapter(model, adapter_path)
    import torch
    from peft import LoraConfig, get_peft_model

    names = list(lora.target_modules)
    linear = [layer for layer, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    inside = [layer for layer in linear if re.fullmatch(within or ".*", layer)]
    known = {layer.rpartition(".")[2] for layer in inside}
    # PEFT raises only when none of the names matches.
    if lost := [name for name in names if not _ends_one(name, inside)]:
        raise ValueError(
            f"policy.lora.target_modules: {', '.join(map(repr, lost))} is the name of no layer"
            f"{' that may be adapted' if within else ''} in this model, and nothing would be "
            f"trained there; name some of: {', '.join(sorted(known))}"
        )
    # The tower's patch convolution has the name of one of its linear layers.
    others = [
        layer
        for layer, module in model.named_modules()
        if layer.rpartition(".")[2] in names and not isinstance(module, torch.nn.Linear)
    ]
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=rf"{within}\.({'|'.join(names)})" if within else names,
        exclude_modules=others or None,
    )
    with torch.random.fork_rng(devices=[]):
        # Every rank starts from the same adapter, whatever its random state.
        torch.manual_seed(seed if lora.init_seed is None else lora.init_seed)
        return get_peft_model(model, config)


def _with_saved_adapter(model: Any, adapter_path: str) -> Any:
    """Raises ValueError unless each tensor has a layer and each layer its tensors: PEFT ignores
    tensors without a layer, and initialises layers without tensors at random."""
    from peft import PeftModel

    mapping = getattr(model, "_checkpoint_conversion_mapping", {})
    loading = {"is_trainable": True, "torch_device": "cpu", "key_mapping": mapping}
    where = f"policy.adapter_path: {adapter_path}"
    remedy = "name an adapter that was trained on this model (policy.model_path), or train anew"
    if (Path(adapter_path) / ADAPTER_CONFIG).is_file():
        read_config(Path(adapter_path))
    try:
        adapted = PeftModel.from_pretrained(model, adapter_path, **loading)
        # Load a second time: only this call returns the unexpected and missing keys.
        keys = adapted.load_adapter(adapter_path, "default", **loading)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{where} does not fit: {shown(str(error), 300)}; {remedy}") from None
    if keys.unexpected_keys or keys.missing_keys:
        first = shown((keys.unexpected_keys or keys.missing_keys)[0], 200)
        raise ValueError(
            f"{where} does not fit: {len(keys.unexpected_keys)} of its tensors belong to no layer "
            f"of the model, and {len(keys.missing_keys)} tensors of adapted layers are not in it "
            f"({first}); {remedy}"
        )
    named, layers = adapted.peft_config["default"].target_modules, dict(model.named_modules())
    if lost := [] if isinstance(named, str) else [n for n in named if not _ends_one(n, layers)]:
        warn(
            f"{where}: its {ADAPTER_CONFIG} names {', '.join(map(repr, sorted(lost)))}, which is "
            "the name of no layer in this model; nothing is trained there"
        )
    return adapted


def _ends_one(name: str, layers: Iterable[str]) -> bool:
    """Whether the path of a layer is `name` or ends with it ('self_attn.q_proj')."""
    return any(f".{layer}".endswith(f".{name}") for layer in layers)
