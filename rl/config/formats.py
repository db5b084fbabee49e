"""The formats of what changes hands: their numbers, and older ones under today's names.

    config         its key `format`; a file without one is taken for today's
    run folder     the `format` of its config.json, and of its records; without one: 1
    checkpoint     the `format` of its state.json
    adapter        `auto_mapping.format` of its adapter_config.json; without one: 1

A number rises when something there is called otherwise or means something else; a key that is new
and has a default does not raise it. What not: the names, which are data
(`configs/renamed.libsonnet`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import _jsonnet

from rl.config.shipped import configs_folder

CONFIG = 3
"""Of configs and run folders."""
GONE = {"checkpoint": ("keep",)}
"""Section -> keys that runs of today's format may still have written, and nothing reads."""
CHECKPOINT = 1
ADAPTER = 2


def refusal(what: str, number: Any, known: int) -> str:
    """Why `what`, of that format number, cannot be read where `known` is the newest; or ''."""
    if type(number) is not int or number < 1:
        return f"{what} has the format {number!r}: mend it, formats are whole numbers from 1 on"
    if number > known:
        return (
            f"{what} has the format {number}, and this version reads up to {known}: a newer one "
            "wrote it; update vlm-edit-rl"
        )
    return ""


def stored(config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A config that a run has written, `what` for the message, under today's names.

    Raises ValueError for one of a newer format.
    """
    number = config.get("format", 1)
    if problem := refusal(what, number, CONFIG):
        raise ValueError(problem)
    config = renamed(config, number, number)[0]
    for section, keys in GONE.items():
        if isinstance(found := config.get(section), Mapping):
            config[section] = {key: value for key, value in found.items() if key not in keys}
    return config


def renamed(
    config: Mapping[str, Any], since: int = 1, spoken: int = CONFIG
) -> tuple[dict[str, Any], list[str]]:
    """A config under today's names, and a sentence for each that is old.

    Args:
        since: names older than this format do not occur in it.
        spoken: the format whose words it speaks, where a word of old means something else today.
    """
    said: list[str] = []
    value: Any = dict(config)
    for number, step in _steps(since):
        meant = step if number > spoken else {**step, "values": {}}
        value = _renamed(value, "", meant, said)
    return value, said


def moved(path: str) -> str:
    """Where a path of the first format lies today."""
    for _, step in _steps(1):
        path = _today(path, "", step)
    return path


def recorded(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics.jsonl or of an evaluation, of whatever format, under today's names."""
    names = {old: new for _, step in _steps(1) for old, new in step["recorded"].items()}
    return {names.get(name, name): value for name, value in row.items()}


def _renamed(value: Any, key: str, step: Mapping[str, Any], said: list[str]) -> Any:
    if isinstance(value, Mapping):
        found = {}
        for name, item in value.items():
            inner = f"{key}.{name}" if key else name
            if inner in step["keys"]:
                name = step["keys"][inner]
                said.append(f"{inner}: is called {name} now; write that")
            found[name] = _renamed(item, inner, step, said)
        return found
    if isinstance(value, list):
        return [_renamed(item, f"{key}.{index}", step, said) for index, item in enumerate(value)]
    now = _today(value, key, step) if isinstance(value, str) else value
    if now != value:
        said.append(f"{key}: {value!r} is called {now!r} now; write that")
    return now


def _today(value: str, key: str, step: Mapping[str, Any]) -> str:
    if re.fullmatch(r"data\.\w+\.\d+\.type", key):
        return str(step["data"].get(value, value))
    if key in step["values"]:
        return str(step["values"][key].get(value, value))
    for old, new in step["folders"].items():
        if value.startswith(old) and not Path(value).exists():
            return str(new + value.removeprefix(old))
    return value


def _steps(since: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Each format after `since` and what it has renamed, oldest first."""
    return ((number, step) for number, step in sorted(_table().items()) if number > since)


@cache
def _table() -> dict[int, Any]:
    steps = json.loads(_jsonnet.evaluate_file(str(configs_folder() / "renamed.libsonnet")))
    return {int(number): step for number, step in steps.items()}
