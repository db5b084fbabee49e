"""Names the hub's models that a run loads, and downloads them before its ranks start."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl.api.plugin import ModelFiles
from rl.build import Plugin, Resolved
from rl.files.model_files import cached

SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
"""Files beside the weights: config, tokenizer, template."""


def is_offline() -> bool:
    """Whether the environment forbids to ask the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def hub_models(resolved: Resolved) -> list[tuple[str, str, bool]]:
    """(key, hub id, whether it is in the local cache) of every model that a plugin loads."""
    found: dict[tuple[str, str], bool] = {}
    for key, model in _models_of(resolved):
        found[key, model.path] = found.get((key, model.path), True) and _is_cached(model)
    return [(*place, is_cached) for place, is_cached in found.items()]


def fetch_models(resolved: Resolved) -> list[str]:
    """Downloads them into the local cache, in this one process, with a progress bar; a file that is
    missed here is fetched by the rank that reads it. Returns what is neither there nor can be
    fetched, with its key and remedy."""
    if is_offline():
        return []
    patterns: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    for _, model in _models_of(resolved):
        stems = [Path(name).stem for name in model.weights]
        weights = [f"{stem}{rest}" for stem in stems for rest in (".safetensors*", "-*-of-*")]
        names = [os.path.join(model.subfolder, name) for name in (*SMALL_FILES, *weights)]
        patterns[model.path, model.revision] += names
    problems = []
    missing = {path: key for key, path, is_cached in hub_models(resolved) if not is_cached}
    for (path, revision), wanted in patterns.items():
        from huggingface_hub import snapshot_download

        try:
            snapshot_download(path, revision=revision, allow_patterns=wanted)
        except Exception as error:  # the network and its library may fail in any way
            if path in missing:
                problems.append(
                    f"{missing[path]}: {path} cannot be fetched ({error}); name another or a "
                    "folder, or fetch it by `hf download` (a gated one needs HF_TOKEN)"
                )
    return problems


def _models_of(resolved: Resolved) -> Iterator[tuple[str, ModelFiles]]:
    """(key, files) of every model of the hub that a plugin loads."""
    plugins: list[Plugin[Any]] = [resolved.policy, *resolved.model_runners]
    for plugin in plugins:
        for model in plugin.cls.models(plugin.config):
            if not Path(model.path).is_dir():
                yield f"{plugin.key}.{model.key}", model


def _is_cached(model: ModelFiles) -> bool:
    """By its config file or, where it may lack one, by the others that are read."""
    others = [name for names in model.files for name in names]
    names = [model.config] if model.config_required else others
    places = (os.path.join(model.subfolder, name) for name in names)
    return not names or any(cached(model.path, place, model.revision) for place in places)
