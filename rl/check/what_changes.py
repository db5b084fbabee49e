"""What a config changes of the file that it imports, and what it drops of it by mistake."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.build import Resolved
from rl.config.loading import escaped, find_config, own_and_base
from rl.printing import scrub

Values = Mapping[str, Any]
MAX_LINES, MAX_CHARS, MAX_DROPPED = 40, 78, 3
NAMES = ("run_name", "base_exp_dir")
"""The report's first line has them."""
BY_NAME = ("rewards", "weights")
"""Their keys are names of rewards; others are no mistake."""


@dataclass(frozen=True)
class Origin:
    """A config's own values and those of the file that it is built upon, as `own_and_base`."""

    own: Values = field(default_factory=dict)
    base: Values = field(default_factory=dict)
    name: str = ""


UNKNOWN = Origin()


def origin_of(path: str | Path, overrides: Sequence[str]) -> Origin:
    """The origin of the config in the file at `path`."""
    file = find_config(path)
    return Origin(**own_and_base(file, overrides, os.environ)) if file else UNKNOWN


def changes(origin: Origin) -> dict[str, list[str]]:
    """Title -> 'key: value (was value)' for all that differs from the imported file or, without
    one, from the defaults; {} if nothing does."""
    base = dict(_leaves(origin.base))
    lines = []
    for key, value in _leaves(origin.own):
        if value != base.get(key, ...) and key not in NAMES:
            max_chars = (MAX_CHARS - len(key)) // (1 + (key in base))
            was = f" (was {_text(base[key], max_chars)})" if key in base else ""
            lines.append(f"{key}: {_text(value, max_chars)}{was}")
    more = [f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
    return {f"differs from {origin.name}": [*lines[:MAX_LINES], *more]} if lines else {}


def dropped(resolved: Resolved, origin: Origin) -> list[str]:
    """'section: what it drops of the imported file' for each section replaced without `+`."""
    now = dict(_leaves(resolved.config.model_dump(mode="json")))
    for plugin in resolved.plugins:
        now |= _leaves(plugin.config.model_dump(mode="json"), f"{plugin.key}.")
    lines = []
    for section, base in _replaced(origin.own, origin.base):
        texts = [
            f"{key} {_text(value, MAX_CHARS // 3)}"
            for key, value in base.items()
            if value != now.get(f"{section}.{key}", ...)
        ]
        if texts:
            more = [f"{len(texts) - MAX_DROPPED} more"] if len(texts) > MAX_DROPPED else []
            listed = ", ".join([*texts[:MAX_DROPPED], *more])
            lines.append(f"{section}: drops {listed}; {_remedy(section)} to keep them")
    return lines


def explained(problems: Sequence[str], origin: Origin) -> list[str]:
    """The problems of a config; a missing key says that the imported file has it, if it does."""
    known = [key for key, _ in _leaves(origin.base) if "." in key]
    lines = []
    for problem in problems:
        key, _, rest = problem.partition(": ")
        if key in known and rest.startswith("missing"):
            problem += f"; {origin.name} has it: {_remedy(key.rpartition('.')[0])} to keep it"
        lines.append(problem)
    return lines


def _leaves(values: Values, at: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all that is no section; a list is one value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{at}{key}.")
        elif key != "+":
            yield f"{at}{key}", value


def _replaced(own: Values, base: Values, at: str = "") -> Iterator[tuple[str, Values]]:
    """(dotted key, what it lacks of `base`) of each section replaced without `+`."""
    for key, was in base.items():
        new: Any = own.get(key)
        are_sections = isinstance(was, Mapping) and isinstance(new, Mapping)
        if are_sections and new.get("type", was.get("type")) == was.get("type"):
            if "+" not in new and key not in BY_NAME:
                yield f"{at}{key}", {name: was[name] for name in was if name not in new}
            yield from _replaced(new, was, f"{at}{key}.")


def _remedy(section: str) -> str:
    text = "..."
    for part in reversed(section.split(".")):
        text = f"{part}+: {{ {text} }}"
    return f"write {text}"


def _text(value: Any, max_chars: int) -> str:
    return escaped(scrub(json.dumps(value)), max_chars)  # half a secret would not be known
