"""What a config changes of the file that it imports, and what it drops of it by mistake."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from rl.build import Resolved, RewardPlugin
from rl.config.jsonnet import Base, built_upon
from rl.config.messages import sections
from rl.config.printing import escaped
from rl.config.schema import RunConfig, chosen_engine, with_pool
from rl.config.shipped import find_config
from rl.files.atomic import with_leaves
from rl.text.scrub import scrub

Values = Mapping[str, Any]
MAX_LINES, MAX_CHARS, MAX_DROPPED = 40, 78, 3
ABSENT: Any = ...
SECTIONS = {key for key, _ in sections(RunConfig)} | {"policy", "engine", "renderer", "rewards"}
NAMES = ("run_name", "base_exp_dir")
"""The report's first line has them."""


@dataclass(frozen=True)
class Origin:
    """What a config states, and the files that it is built upon."""

    own: Values
    bases: Sequence[Base]


UNKNOWN = Origin({}, ())


Change = tuple[str, Any, Any, bool]
"""(key, value, base's value, whether the key has its default again because its section was replaced
without `+`). ABSENT: neither a value nor a default."""


def origin_of(
    path: str | Path, overrides: Sequence[str], config: RunConfig | None = None
) -> Origin:
    """The origin of the config in the file at `path`; None: it has problems."""
    own = config.model_dump(mode="json", exclude_unset=True) if config else {}
    file = find_config(path)
    bases = built_upon(file, overrides, os.environ, own) if file else []
    return Origin(own, [base for base in bases if base.values.keys() & SECTIONS])


def changes(resolved: Resolved, origin: Origin) -> dict[str, list[str]]:
    """Title -> 'key: value (was value)' for all that differs from the first imported file or,
    without one, from the defaults; {} if nothing does."""
    if not origin.own:
        return {}
    base = next(iter(origin.bases), Base("the defaults", {}, {}))
    found = _changes(resolved, origin.own, base.values)
    lines = [_line(*change[:3]) for change in found if change[0] not in NAMES]
    more = [f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
    return {f"differs from {base.name}": [*lines[:MAX_LINES], *more]} if lines else {}


def dropped(resolved: Resolved, origin: Origin) -> list[str]:
    """'section: what it drops of an imported file' for each section replaced without `+`."""
    texts_of: dict[str, dict[str, str]] = {}
    for base in origin.bases:
        for path, value, its_value, is_dropped in _changes(resolved, origin.own, base.sections):
            if is_dropped:
                section, _, key = path.rpartition(".")
                was, now = _texts(its_value, value, MAX_CHARS // 3)
                texts_of.setdefault(section, {})[key] = f"{key} {was} (now {now})"
    lines = []
    for section, texts in texts_of.items():
        more = [f"{len(texts) - MAX_DROPPED} more"] if len(texts) > MAX_DROPPED else []
        listed = ", ".join([*list(texts.values())[:MAX_DROPPED], *more])
        lines.append(f"{section}: drops {listed}; {_remedy(section)} to keep them")
    return lines


def explained(problems: Sequence[str], origin: Origin) -> list[str]:
    """The problems of a config; a missing key says which imported file has it, if one does."""
    lines = list(problems)
    for i, problem in enumerate(problems):
        key, _, rest = problem.partition(": ")
        section, _, last = key.rpartition(".")
        for base in origin.bases if section and rest.startswith("missing") else ():
            if last in reduce(_inside, section.split("."), base.values):
                lines[i] = f"{problem}; {base.name} has it: {_remedy(section)} to keep it"
    return lines


def _inside(of: Values, part: str) -> Values:
    inner = of.get(part)
    return inner if isinstance(inner, Mapping) else {}


def _remedy(section: str) -> str:
    text = "..."
    for part in reversed(section.split(".")):
        text = f"{part}+: {{ {text} }}"
    return f"write {text}"


def _changes(resolved: Resolved, own: Values, base: Values) -> Iterator[Change]:
    config = resolved.config
    models: dict[str, list[Any]] = {}
    for plugin in resolved.plugins:
        keys = [plugin.keys] if isinstance(plugin, RewardPlugin) else []
        models[plugin.key] = [plugin.config, *keys]

    def walk(
        at: str, of: Sequence[Any], value: Values, was: Values, in_list: bool = False
    ) -> Iterator[Change]:
        """`of`: the section's models, which have the defaults."""
        is_other = was.get("type", value.get("type")) != value.get("type")  # of another plugin
        for key in dict.fromkeys([*value, *was]):
            path = f"{at}.{key}" if at else key
            new, old = _stated(key, value, of), _stated(key, was, () if is_other else of)
            parts, found = _parts(new, old), []
            if parts:
                inner = models.get(path) or [getattr(model, key, None) for model in of]
                found = [*walk(path, inner, *parts, in_list or isinstance(new, list))]
            if parts and (key in value or not found):
                yield from found
            elif new != old and not (is_other and key not in value):
                is_dropped = key not in value and new is not ABSENT and not in_list
                yield path, new, old, is_dropped

    def settled(values: Values) -> Values:
        values = with_pool(values)
        in_order = {key: values[key] for key in RunConfig.model_fields if key in values}
        if isinstance(engine := values.get("engine"), Mapping):
            in_order["engine"] = chosen_engine(engine, config.policy)
        return in_order

    return walk("", [config], settled(own), settled(base))


def _stated(key: str, values: Values, models: Sequence[Any]) -> Any:
    """The value, else the default, else ABSENT."""
    if key in values:
        return values[key]
    for model in models if key != "type" else ():
        field = type(model).model_fields.get(key) if isinstance(model, BaseModel) else None
        if field is not None and not field.is_required():
            return to_jsonable_python(field.get_default(call_default_factory=True))
    return ABSENT


def _parts(new: Any, old: Any) -> tuple[Values, Values] | None:
    """Both as sections if they are to be compared key by key: lists of as many sections, too."""
    if isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
        if not all(isinstance(item, Mapping) for item in (*new, *old)):
            return None
        new, old = ({str(i): item for i, item in enumerate(of)} for of in (new, old))
    return (new, old) if isinstance(new, Mapping) and isinstance(old, Mapping) else None


def _line(path: str, new: Any, old: Any) -> str:
    max_chars = MAX_CHARS - len(path)
    if old is ABSENT:
        return f"{path}: {escaped(_text(new), max_chars)}"
    value, was = _texts(new, old, max_chars // 2)
    return f"{path}: {value} (was {was})"


def _texts(first: Any, second: Any, max_chars: int) -> tuple[str, str]:
    """Both as text; of long ones, the part around the first difference."""
    one, other = map(_text, (first, second))
    same = next((i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b), 0)
    start = max(0, same - max_chars // 3) if same > max_chars // 2 else 0
    cut = "..." if start else ""
    return escaped(cut + one[start:], max_chars), escaped(cut + other[start:], max_chars)


def _text(value: Any) -> str:
    if value is ABSENT:
        return "nothing"
    if isinstance(value, Mapping) and "type" in value:
        value = {"type": value["type"], **value}
    whole = with_leaves(value, lambda x: int(x) if isinstance(x, float) and x % 1 == 0 else x)
    return scrub(json.dumps(whole))  # before it is cut: `scrub` does not know half a secret
