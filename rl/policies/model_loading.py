"""Finds or downloads model files, and adds a LoRA adapter to a loaded model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rl.api.policy import LoraSection
from rl.console import warn
from rl.model_files import ADAPTER_CONFIG, cached, read_config
from rl.printing import excerpt

TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Patterns of all files in a model's repository except weights and code."""


def local_folder(
    path: str, revision: str | None = None, patterns: Sequence[str] | None = None
) -> Path:
    """`path` if it is a folder, else a download of that hub id's files that match `patterns`."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    allowed = None if patterns is None else list(patterns)
    return Path(snapshot_download(path, revision=revision, allow_patterns=allowed))


def folder_here(path: str, revision: str | None, names: Iterable[Sequence[str]]) -> Path | None:
    """The folder of a model's files, `path` itself or in the local cache, if it has one file of
    each of `names`; no other machine is asked."""

    def find(name: str) -> Path | None:
        file = Path(path, name)
        return file if file.is_file() else cached(path, name, revision)

    files = [next(filter(None, map(find, kinds)), None) for kinds in names]
    return files[0].parent if files[0] is not None and all(files) else None


def load_tokenizer(config: Any) -> Any:
    """The tokenizer in a policy section's `model_path`. Raises OSError naming what is missing."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        config.model_path, revision=config.revision, trust_remote_code=False
    )


def link_files(folder: Path, overlay: Path, skip: Sequence[str] = ()) -> None:
    """Link files into `overlay`, except names that contain one of `skip` or that it already has."""
    for file in folder.iterdir():
        link = overlay / file.name
        if file.is_file() and not link.exists() and not any(part in file.name for part in skip):
            link.symlink_to(file.resolve())


def adapt(
    model: Any, lora: LoraSection | None, adapter_path: str, within: str = "", seed: int = 0
) -> Any:
    """Returns the model with a trainable LoRA, loaded from `adapter_path` or new, on the layers
    that `lora` names inside modules that match the regex `within` ('' = anywhere). Without `lora`,
    all weights become trainable. A new LoRA is initialised with the seed `lora.init_seed`, or with
    `seed` if that is None.

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
    candidates = [layer for layer in linear if re.fullmatch(within or ".*", layer)]
    candidate_names = {layer.rpartition(".")[2] for layer in candidates}
    # PEFT raises only when none of the names matches.
    if unmatched := [name for name in names if not _names_a_layer(name, candidates)]:
        raise ValueError(
            "policy.lora.target_modules: no layer of this model"
            f"{' that may be adapted' if within else ''} is named {', '.join(map(repr, unmatched))}"
            f", so it would train nothing; choose from: {', '.join(sorted(candidate_names))}"
        )
    # The vision tower's patch convolution has the same name as one of its linear layers.
    not_linear = [
        layer
        for layer, module in model.named_modules()
        if layer.rpartition(".")[2] in names and not isinstance(module, torch.nn.Linear)
    ]
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=rf"{within}\.({'|'.join(names)})" if within else names,
        exclude_modules=not_linear or None,
    )
    with torch.random.fork_rng(devices=[]):
        # Every rank starts from the same adapter, whatever its random state.
        torch.manual_seed(seed if lora.init_seed is None else lora.init_seed)
        return get_peft_model(model, config)


def _with_saved_adapter(model: Any, adapter_path: str) -> Any:
    """Raises ValueError unless tensors and layers match one to one: PEFT ignores tensors without a
    layer, and initialises layers without tensors at random."""
    from peft import PeftModel

    mapping = getattr(model, "_checkpoint_conversion_mapping", {})
    loading = {"is_trainable": True, "torch_device": "cpu", "key_mapping": mapping}
    subject = f"policy.adapter_path: {adapter_path}"
    remedy = "name an adapter that was trained on this model (policy.model_path), or drop the key"
    if (Path(adapter_path) / ADAPTER_CONFIG).is_file():
        read_config(Path(adapter_path))
    try:
        adapted = PeftModel.from_pretrained(model, adapter_path, **loading)
        # Load a second time: only this call returns the unexpected and missing keys.
        keys = adapted.load_adapter(adapter_path, "default", **loading)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{subject} does not fit: {excerpt(str(error), 300)}; {remedy}") from None
    if keys.unexpected_keys or keys.missing_keys:
        first = excerpt((keys.unexpected_keys or keys.missing_keys)[0], 200)
        raise ValueError(
            f"{subject} does not fit: {len(keys.unexpected_keys)} of its tensors belong to no "
            f"layer of the model, and {len(keys.missing_keys)} tensors of adapted layers are not "
            f"in it ({first}); {remedy}"
        )
    layers = dict(model.named_modules())
    targets = adapted.peft_config["default"].target_modules
    names = () if isinstance(targets, str) else sorted(targets)
    if unmatched := [repr(name) for name in names if not _names_a_layer(name, layers)]:
        warn(
            f"{subject}: its {ADAPTER_CONFIG} names {', '.join(unmatched)}, but no layer of this "
            "model has such a name; the entry trains nothing"
        )
    return adapted


def _names_a_layer(name: str, layers: Iterable[str]) -> bool:
    """Whether the path of a layer is `name` or ends with it ('self_attn.q_proj')."""
    return any(f".{layer}".endswith(f".{name}") for layer in layers)
