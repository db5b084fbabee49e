"""Reads what a model card states from a stored config: base model, data, judge, licences."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.files.adapter_base import is_hub_id
from rl.files.model_files import cached

_LICENSE = re.compile(r"[A-Za-z0-9][\w.-]{0,59}")
_MAX_README_BYTES = 1_000_000


def at(config: Any, key: str) -> Any:
    """The value at 'section.key'; None where there is none."""
    for word in key.split("."):
        config = config.get(word) if isinstance(config, Mapping) else None
    return config


def is_of_hub(place: object) -> bool:
    """Whether that is a repository's id, and no folder of that name lies here."""
    return isinstance(place, str) and bool(place) and is_hub_id(place)


def base_of(config: Mapping[str, Any]) -> str:
    """The weights that training started from, folder or hub id; '' where nobody knows."""
    base = at(config, "policy.init_text_encoder_from") or at(config, "policy.model_path")
    return base if isinstance(base, str) else ""


def judge_of(config: Mapping[str, Any]) -> str:
    """The judge's model; '' where no judge is asked."""
    if not (at(config, "judge.api_base") or at(config, "judge.start_command")):
        return ""
    return str(at(config, "judge.model") or "(unnamed)")


def training_paths(config: Mapping[str, Any]) -> list[str]:
    sources = at(config, "data.train")
    paths = [at(s, "path") for s in (sources if isinstance(sources, list) else [])]
    return [path for path in paths if isinstance(path, str)]


def without_places(value: Any) -> Any:
    """`value` with no path or address of the machine that trained; ids of the hub stay."""
    if isinstance(value, Mapping):
        return {key: without_places(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_places(item) for item in value]
    if not isinstance(value, str) or value.startswith("pkg://"):
        return value
    if "://" in value:
        return "(an address)"
    is_path = "/" in value or value.startswith("~")
    return f"(a path)/{Path(value).name}" if is_path and not is_of_hub(value) else value


def licence_of(place: str) -> tuple[str, ...] | None:
    """The licence that the card of a model or a data set states, with its own name where that is
    'other'; None where no card lies there, in the folder or the hub's cache, or it states none.
    The network is not asked."""
    from huggingface_hub import metadata_load

    folder = Path(place)
    try:
        card = (
            folder / "README.md"
            if folder.is_dir()
            else is_of_hub(place) and cached(place, "README.md")
        )
        if not card or not card.is_file() or card.stat().st_size > _MAX_README_BYTES:
            return None
        stated = metadata_load(card)
    except Exception:  # of a reader of YAML, in which anybody may have written anything
        return None
    if not isinstance(stated, Mapping):
        return None
    names = [stated.get("license"), stated.get("license_name")]
    if not isinstance(names[0], str) or not _LICENSE.fullmatch(names[0]):
        return None
    if names[0] != "other":
        return (names[0],)
    own = names[1] if isinstance(names[1], str) and _LICENSE.fullmatch(names[1]) else "unnamed"
    return names[0], own
