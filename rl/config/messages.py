"""Reads plain values into a config section, or reports every mistake in it by its key."""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

M = TypeVar("M", bound=BaseModel)
MAX_PROBLEMS = 100
"""Limit of problems per section: finding the nearest known key takes milliseconds each."""
MAX_SHOWN = 60
MAX_KNOWN = 16
_ALTERNATIVE = re.compile(r"\[key\]|str|bool|constrained-\w+|(list|tuple|literal)\[.+\]")
"""What pydantic adds to the `loc` of an error inside a union."""


def validate(model: type[M], values: Mapping[str, Any], at: str = "") -> tuple[M | None, list[str]]:
    """`values` as a `model`, or None and every problem.

    Strict: a string is never taken for a number nor a number for a flag. `at`: the key of the
    section, for the messages ('' for the whole config).
    """
    try:
        # Through JSON, because strict mode would refuse a Python list for a tuple.
        return model.model_validate_json(json.dumps(values), strict=True), []
    except RecursionError:
        return None, [f"{at or 'the config'}: lists or sections are nested too deeply; flatten it"]
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=True)
        # Each alternative of a union has its own error.
        of_key: dict[tuple[str, ...], dict[str, Any]] = {}
        for each in errors[:MAX_PROBLEMS]:
            loc = tuple(part for part in map(str, each["loc"]) if not _ALTERNATIVE.fullmatch(part))
            first = of_key.setdefault(loc, {**each, "loc": loc})
            if first["msg"] != each["msg"]:
                first["msg"] += f" or {each['msg'].removeprefix('Input should be ')}"
        return None, [_sentence(model, problem, at, values) for problem in of_key.values()]


def nearest(name: str, known: Sequence[str]) -> str:
    """`did you mean 'x'?`, or the known names (the nearest, of many) if none is similar."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    # 'rank' for 'r', 'lr' for 'lr_decay': one is the beginning of the other.
    close = close or [n for n in known if name and (n.startswith(name) or name.startswith(n))][:1]
    if close:
        return f"did you mean {close[0]!r}?"
    shown = sorted(difflib.get_close_matches(name, known, n=MAX_KNOWN, cutoff=0.0))
    more = f" and {len(known) - len(shown)} more" * (len(shown) < len(known))
    return f"known: {', '.join(shown)}{more}" if known else "nothing is known here"


def sections(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted key, section) of `model` and of every section inside it."""
    yield at, model
    for name, field in model.model_fields.items():
        section = _section_of(field)
        if section:
            yield from sections(section, f"{at}.{name}" if at else name)


def _sentence(
    model: type[BaseModel], problem: Mapping[str, Any], at: str, values: Mapping[str, Any]
) -> str:
    loc = problem["loc"]
    key = ".".join(part[:MAX_SHOWN] for part in (at, *loc) if part) or "the config"
    kind = problem["type"]
    if kind == "extra_forbidden":
        return f"{key}: unknown key; {_nearest_key(model, loc, at, values)}"
    if kind == "value_error":  # the section's own message
        return f"{key}: {problem['ctx']['error']}"
    if kind == "json_invalid" or not loc:
        return f"{key}: {problem['msg']}"
    field = _field_at(model, loc)
    description = f" ({' '.join(field.description.split())})" if field and field.description else ""
    if kind == "missing":
        return f"{key}: missing{description}"
    value = json.dumps(problem["input"])
    value = value if len(value) <= MAX_SHOWN else f"{value[: MAX_SHOWN - 3]}..."
    allowed = problem["msg"].removeprefix("Input should be ").removeprefix("String should ")
    must = "must" if kind.startswith("string_pattern") else "must be"
    literals = re.findall("'(.+?)'", allowed) if kind == "literal_error" else []
    close = difflib.get_close_matches(str(problem["input"]), literals, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    if kind.startswith("string_type") and isinstance(problem["input"], int | float):
        hint = f"; write it in quotes (on the command line: \"{key}='{value}'\")"
    elif isinstance(problem["input"], str) and not (kind.startswith("string") or literals):
        with suppress(ValueError):
            json.loads(problem["input"])
            hint = (
                "; write it without quotes, or std.parseJson(std.extVar(...)) for std.extVar(...)"
            )
    return f"{key}: {value} given, {must} {allowed}{hint}{description}"


def _nearest_key(
    model: type[BaseModel], loc: Sequence[str], at: str, values: Mapping[str, Any]
) -> str:
    """Suggests the nearest key of the same section, else another section that has this key."""
    name = loc[-1][:MAX_SHOWN]
    section = _section_of(_field_at(model, loc[:-1])) if loc[1:] else model
    known = list(section.model_fields) if section else []
    is_top = not (at or loc[1:])
    if is_top or not difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        keys = [key for key, other in sections(model, at) if name in other.model_fields]
        if is_top:  # `model` does not know the keys of plugins, but the file may state this one
            keys += [key for key, of in values.items() if isinstance(of, dict) and name in of]
        if keys:
            return (
                f"did you mean '{keys[0]}.{name}'?" if keys[0] else f"{name!r} is a top-level key"
            )
    return nearest(name, known)


def _section_of(field: FieldInfo | None) -> type[BaseModel] | None:
    """The section class that a field holds (`Section | None` too), or None."""
    kinds = (field.annotation, *typing.get_args(field.annotation)) if field else ()
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def _field_at(model: type[BaseModel], loc: Sequence[str]) -> FieldInfo | None:
    """The innermost declared field on the way to `loc` (it ends at a list index or dict key)."""
    field = model.model_fields.get(loc[0]) if loc else None
    is_dict = field is not None and typing.get_origin(field.annotation) is dict
    inside = loc[2 if is_dict else 1 :]  # behind the dict's own key
    section = _section_of(field) if inside else None
    return _field_at(section, inside) if section else field
