"""Checks from names, sizes and headers that a model's files exist, are whole and of its kind."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl.api.plugin import ModelFiles
from rl.config.paths import FOLDER, GONE, not_a_file
from rl.config.printing import escaped
from rl.files.atomic import read_object
from rl.files.weights import weights_problem

MAX_SHOWN = 200
KIND_KEYS = ("model_type", "_class_name")
"""Keys that name the kind of model in a config file: transformers', diffusers'."""


def model_problems(models: Iterable[ModelFiles]) -> Iterator[str]:
    """Problems that prevent loading `models`, as 'key: problem, remedy'. If a folder holds another
    model, only that problem is reported."""
    parts_of_model = defaultdict(list)
    for model in models:
        parts_of_model[model.key, model.path].append(model)
    for (key, path), parts in parts_of_model.items():
        if missing := missing_model(key, path):
            yield from missing
            continue
        is_folder = Path(path).is_dir()
        try:
            problems = list(_folder_problems(parts) if is_folder else _cached_problems(parts))
        except OSError as error:
            problems = [f"{error.filename} cannot be read ({error.strerror})"]
        yield from (f"{key}: {problem}" for problem in problems)


def missing_model(key: str, path: str) -> list[str]:
    """The problem of a model's path; [] if it is an existing folder or looks like a hub id."""
    why = not_a_file(path) if path else GONE
    is_hub_id = path.count("/") == 1 and path[0] not in "/.~" and not path.endswith("/")
    if why == FOLDER or (is_hub_id and why == GONE):
        return []
    path_text = escaped(repr(path), MAX_SHOWN)
    return [f"{key}: no folder {path_text} (from {Path.cwd()}), and not a hub id 'owner/name'"]


def cached(repo_id: str, name: str, revision: str | None = None) -> Path | None:
    """A hub repository's file in the local cache; None if it is not cached."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return None
    if not Path(constants.HF_HUB_CACHE, "models--" + repo_id.replace("/", "--")).is_dir():
        return None  # checked without the slow import below
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached_path = try_to_load_from_cache(repo_id, name, revision=revision)
    except HFValidationError:
        return None
    return Path(cached_path) if isinstance(cached_path, str) else None


def _cached_problems(parts: Iterable[ModelFiles]) -> Iterator[str]:
    """Check cached config files only: weights that are not cached are downloaded later."""
    for part in parts:
        file = cached(part.path, os.path.join(part.subfolder, part.config), part.revision)
        if file is not None:
            problem = _wrong_kind(part, read_object(file), f"{part.path} ({file})")
            if problem:
                yield problem
                return


def _folder_problems(parts: Iterable[ModelFiles]) -> Iterator[str]:
    lacking: list[str] = []
    damaged: list[str] = []
    for part in parts:
        folder = Path(part.path, part.subfolder)
        file = folder / part.config
        if file.is_file():
            if problem := _wrong_kind(part, read_object(file), str(file)):
                yield problem
                return
        elif part.config_required:
            lacking.append(os.path.join(part.subfolder, part.config))
        for names in part.files:
            if not any((folder / name).is_file() for name in names):
                lacking.append(" or ".join(os.path.join(part.subfolder, name) for name in names))
        missing, broken = _weights_problems(part, folder)
        lacking += missing
        damaged += broken
    if lacking:
        yield f"{part.path} lacks {', '.join(lacking)}; copy or download it again"
    yield from damaged


def _weights_problems(part: ModelFiles, folder: Path) -> tuple[list[str], list[str]]:
    """(names of missing files, problems of the existing ones)."""
    if not part.weights:
        return [], []
    for name in part.weights:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            shards = [name]
        elif index.is_file():
            weight_map = (read_object(index) or {}).get("weight_map")
            values = set(weight_map.values()) if isinstance(weight_map, Mapping) else set()
            shards = sorted(str(value) for value in values)
            if not shards:
                return [], [f"{index} names no weights; copy or download it again"]
        else:
            continue
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        damage = (weights_problem(folder / shard) for shard in shards if shard not in missing)
        lacking = [os.path.join(part.subfolder, shard) for shard in missing]
        return lacking, [problem for problem in damage if problem]
    first = os.path.join(part.subfolder, part.weights[0])
    return [f"{first} or {first}.index.json"], []


def _wrong_kind(part: ModelFiles, config: dict[str, Any] | None, where: str) -> str:
    """Why this config file is not of a kind of model that can be loaded here, or ''."""
    if config is None:
        return f"{where} is damaged: it holds no JSON object; copy or download it again"
    key = next((key for key in KIND_KEYS if key in config), " or ".join(KIND_KEYS))
    checks = [(key, [config.get(key)], part.kinds)]
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        checks.append(("architectures", architectures, part.classes))
    for key, values, accepted in checks:
        if accepted and not any(isinstance(name, str) and name in accepted for name in values):
            statement = f"says {key} {values[0]!r}" if values[0] is not None else f"says no {key}"
            needed = " or ".join(map(repr, sorted(accepted)))
            return f"{where} {statement}, but only {needed} can be loaded here; name such a model"
    return ""
