"""What a run sends to other machines, and whom it asks for what."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rl.api.plug import ModelFiles
from rl.build import Plug, Resolved
from rl.files.model_files import cached, missing_model
from rl.judge.endpoint import is_loopback, resolve_api_bases
from rl.record.trackers.wandb_page import allowed_by_env

DATA_FILE = re.compile(r".*\.(jsonl?|txt|csv|parquet|arrow)")


def leaving_lines(resolved: Resolved) -> list[str]:
    """Line by line; ['nothing'] where everything stays."""
    lines = [*_judge(resolved), *_hub(resolved), *_push(resolved), *_trackers(resolved)]
    return lines or ["nothing"]


def hub_models(resolved: Resolved) -> list[tuple[str, str, bool]]:
    """(key, hub id, whether it is in the local cache) of every model that a plug loads."""
    found: dict[tuple[str, str], bool] = {}
    for key, model in models_of(resolved):
        found[key, model.path] = found.get((key, model.path), True) and _is_cached(model)
    return [(*place, is_cached) for place, is_cached in found.items()]


def models_of(resolved: Resolved) -> Iterator[tuple[str, ModelFiles]]:
    """(key, files) of every model of the hub that a plug loads."""
    plugs: list[Plug[Any]] = [resolved.policy, *resolved.model_runners]
    for plug in plugs:
        for model in plug.cls.models(plug.config):
            if not Path(model.path).is_dir():
                yield f"{plug.key}.{model.key}", model


def _is_cached(model: ModelFiles) -> bool:
    """By its config file or, where it may lack one, by the others that are read."""
    others = [name for names in model.files for name in names]
    names = [model.config] if model.config_required else others
    places = (os.path.join(model.subfolder, name) for name in names)
    return not names or any(cached(model.path, place, model.revision) for place in places)


def is_offline() -> bool:
    """Whether the environment forbids to ask the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _judge(resolved: Resolved) -> Iterator[str]:
    judged = [plug for plug in resolved.rewards.values() if plug.cls.needs_judge]
    config = resolved.config.judge
    if not judged or not config.api_base:
        return
    try:
        bases = resolve_api_bases(config.api_base)
    except ValueError:
        return  # what is wrong with it is said elsewhere
    names = {"source": "source", "target": "target", "image": "rendered"}
    needs = frozenset().union(*(plug.cls.needs for plug in judged))
    pictures = ", ".join(word for need, word in names.items() if need in needs)
    what = f"instructions and {pictures} pictures (up to {config.image_side_px} px)"
    for base in bases:
        if not is_loopback(base):
            plain = ", unencrypted" if base.startswith("http:") else ""
            place = f"{urlsplit(base).netloc}{plain}"
            yield f"to the judge at {place}: {what if pictures else 'words'}"


def _hub(resolved: Resolved) -> Iterator[str]:
    if is_offline():
        return
    asked = {path: is_cached for _, path, is_cached in hub_models(resolved)}
    for plug in resolved.plugs:
        for path in plug.cls.reads_from(plug.config):
            is_file = DATA_FILE.fullmatch(path) or Path(path).exists()
            if not is_file and not missing_model(plug.key, path):
                asked.setdefault(path, False)
    if asked:
        names = ", ".join(f"{path} (cached)" if here else path for path, here in asked.items())
        yield f"asked of {_hub_host()}, by name: {names}"


def _push(resolved: Resolved) -> Iterator[str]:
    config = resolved.config.checkpoint
    every = config.push_to_hub_every_n_iterations
    if every:
        place = f"{_hub_host()}/{config.push_to_hub_repo_id}"
        yield f"to {place}: the model, every {every} iterations"


def _trackers(resolved: Resolved) -> Iterator[str]:
    config = resolved.config.tracking
    shown = f"{config.images_per_iteration} episodes with their words and pictures"
    every = config.log_episodes_every_n_iterations
    what = "the config, metrics" + (f", every {every} iterations {shown}" if every else "")
    if allowed_by_env(config.wandb) == "online":
        host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
        yield f"to {host} (wandb): {what}"
    if config.trackio and config.trackio_space:
        yield f"to {_hub_host()}/spaces/{config.trackio_space} (trackio): {what}"


def _hub_host() -> str:
    return urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).netloc
