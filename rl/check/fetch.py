"""Names the hub's models that a run loads, and downloads them before its ranks start."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rl.api.plugin import ModelFiles
from rl.build import Plugin, Resolved
from rl.model_files import cached, model_problems

SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
"""Files beside the weights: config, tokenizer, template."""


def is_offline() -> bool:
    """Whether the environment forbids requests to the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def hub_models(resolved: Resolved) -> list[tuple[str, str, bool]]:
    """(key, hub id, whether it is in the local cache) of every model that a plugin loads."""
    models: dict[tuple[str, str], bool] = {}
    for key, model in _models_of(resolved):
        models[key, model.path] = models.get((key, model.path), True) and _is_cached(model)
    return [(*model, is_cached) for model, is_cached in models.items()]


def fetch_small_files(resolved: Resolved) -> list[str]:
    """Download the files beside the weights of all models into the local cache. Returns a problem,
    with key and remedy, for each model of another kind than its plugin loads, and for each that is
    not cached and cannot be downloaded."""
    problems = _fetch(resolved, lambda model: (model.config, *SMALL_FILES))
    for key, model in [] if is_offline() else _models_of(resolved):
        section = key.removesuffix(model.key)
        problems += (f"{section}{problem}" for problem in model_problems([model]))
    return problems


def fetch_weights(resolved: Resolved) -> list[str]:
    """Download the weights likewise, in one process, with progress bars. (Ranks download files that
    this misses.) Returns the problems."""
    return _fetch(resolved, _weight_files)


def _fetch(resolved: Resolved, names_of: Callable[[ModelFiles], Iterable[str]]) -> list[str]:
    """Download the models' files of these names, if the environment allows it. A failure is a
    problem for models that are not cached: an earlier start may have fetched the others."""
    if is_offline():
        return []
    missing = {path: key for key, path, is_cached in hub_models(resolved) if not is_cached}
    patterns: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    for _, model in _models_of(resolved):
        for name in names_of(model):
            patterns[model.path, model.revision].append(os.path.join(model.subfolder, name))
    problems = []
    for (path, revision), file_patterns in patterns.items():
        from huggingface_hub import snapshot_download

        try:
            snapshot_download(path, revision=revision, allow_patterns=file_patterns)
        except Exception as error:  # the network or the library may raise anything
            if path in missing:
                problems.append(
                    f"{missing[path]}: {path} cannot be fetched ({error}); name another or a "
                    "folder, or fetch it by `hf download` (a gated one needs HF_TOKEN)"
                )
    return problems


def _weight_files(model: ModelFiles) -> list[str]:
    stems = [Path(name).stem for name in model.weights]
    return [f"{stem}{suffix}" for stem in stems for suffix in (".safetensors*", "-*-of-*")]


def _models_of(resolved: Resolved) -> Iterator[tuple[str, ModelFiles]]:
    """(key, files) of every model of the hub that a plugin loads."""
    plugins: list[Plugin[Any]] = [resolved.policy, *resolved.model_runners]
    for plugin in plugins:
        for model in plugin.cls.models(plugin.config):
            if not Path(model.path).is_dir():
                yield f"{plugin.key}.{model.key}", model


def _is_cached(model: ModelFiles) -> bool:
    """Whether the model's config file is cached or, if it needs none, any of its other files."""
    others = [name for names in model.files for name in names]
    names = [model.config] if model.config_required else others
    paths = (os.path.join(model.subfolder, name) for name in names)
    return not names or any(cached(model.path, path, model.revision) for path in paths)
