"""A section's mistakes, all at once, in words a user can act on.

What: `validate`, which reads plain JSON values into a section and turns pydantic's errors into
`key: what was given, what is allowed, the nearest known key`. What not: rules across keys or across
rooms (`preflight/compatibility.py`).
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

M = TypeVar("M", bound=BaseModel)
MAX_PROBLEMS = 100
"""Told of one section: to find the nearest of all keys takes milliseconds."""


def validate(model: type[M], values: Mapping[str, Any], at: str = "") -> tuple[M | None, list[str]]:
    """`values` as a `model`, or None and every problem.

    Strict: a string is never taken for a number nor a number for a flag. `at` is the key that
    holds the section, for the messages ('' for the whole config).
    """
    try:
        # Through JSON, because strict mode would refuse a Python list for a tuple.
        return model.model_validate_json(json.dumps(values), strict=True), []
    except RecursionError:
        return None, [_too_deep(at)]
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=True)
        # Each alternative of a union has its own error.
        said = dict.fromkeys(_sentence(model, one, at) for one in errors[:MAX_PROBLEMS])
        more = len(errors) - MAX_PROBLEMS
        rest = [f"{at or 'the config'}: and {more} more mistakes"] if more > 0 else []
        return None, [*said, *rest]


def nearest(name: str, known: Sequence[str]) -> str:
    """` Did you mean 'x'?`, or every known name when none is near."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + ", ".join(sorted(known)) if known else "nothing is known here"


def sections(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted key, section) of `model` and of every section inside it."""
    yield at, model
    for name, field in model.model_fields.items():
        section = _section_of(field)
        if section:
            yield from sections(section, f"{at}.{name}" if at else name)


def _sentence(model: type[BaseModel], problem: Mapping[str, Any], at: str) -> str:
    loc = [str(part) for part in problem["loc"] if part not in ("[key]", *_ALTERNATIVES)]
    key = ".".join([at, *loc] if at else loc)
    given = _shown(problem["input"])
    kind = problem["type"]
    if kind == "json_invalid":  # of what `json.dumps` has written
        return _too_deep(at)
    if kind == "extra_forbidden":
        return f"{key}: unknown key; {_nearest_key(model, loc)}"
    if kind == "value_error":  # a section's own words, which name the key
        return f"{key}: {problem['ctx']['error']}"
    if not loc:  # no JSON, or no object
        return f"{at or 'the config'}: {problem['msg']}"
    field = _field_at(model, loc)
    about = f" ({' '.join(field.description.split())})" if field and field.description else ""
    if kind == "missing":
        return f"{key}: missing{about}"
    if kind == "string_pattern_mismatch":
        return f"{key}: {given} given, must match {problem['ctx']['pattern']}{about}"
    is_item = loc[-1].isdigit()
    allowed = (not is_item and _allowed(field)) or problem["msg"].removeprefix("Input should be ")
    quotes = isinstance(problem["input"], str) and "must be" not in allowed and _is_number(field)
    remedy = "; strings are not taken for numbers: drop the quotes" if quotes else ""
    return f"{key}: {given} given, must be {allowed}{remedy}{about}"


def _too_deep(at: str) -> str:
    return f"{at or 'the config'}: holds lists or sections that are nested too deeply; flatten it"


def _nearest_key(model: type[BaseModel], loc: Sequence[str]) -> str:
    """The nearest key of the same section; else the section where that very key lives."""
    section = _section_at(model, loc[:-1])
    name = loc[-1]
    known = list(section.model_fields) if section else []
    if not difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        homes = [key for key, other in sections(model) if name in other.model_fields]
        if homes:
            return (
                f"did you mean '{homes[0]}.{name}'?" if homes[0] else f"{name!r} is a top-level key"
            )
    return nearest(name, known)


def _section_of(field: FieldInfo | None) -> type[BaseModel] | None:
    """The section a field holds (also an optional one), or None."""
    for annotation in _plain_types(field.annotation) if field else []:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
    return None


def _section_at(model: type[BaseModel], loc: Sequence[str]) -> type[BaseModel] | None:
    return _section_of(_field_at(model, loc)) if loc else model


def _field_at(model: type[BaseModel], loc: Sequence[str]) -> FieldInfo | None:
    """The innermost declared field on the way to `loc` (list indices and free keys end the way)."""
    field = model.model_fields.get(loc[0]) if loc else None
    section = _section_of(field) if len(loc) > 1 else None
    return _field_at(section, loc[1:]) if section else field


def _plain_types(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, without None."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [part for arg in typing.get_args(annotation) for part in _plain_types(arg)]
        return [part for part in parts if part is not type(None)]
    if typing.get_origin(annotation) is typing.Annotated:
        return _plain_types(typing.get_args(annotation)[0])
    return [annotation]


def _metadata(field: FieldInfo) -> list[Any]:
    """Bounds of the field, also those inside `Annotated[...] | None`."""
    found = list(field.metadata)
    for arg in typing.get_args(field.annotation):
        if typing.get_origin(arg) is typing.Annotated:
            for extra in typing.get_args(arg)[1:]:
                found += extra.metadata if isinstance(extra, FieldInfo) else [extra]
    return found


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
_ALTERNATIVES = ("str", "list[str]")
"""As pydantic names them in the place of an error."""


def _is_number(field: FieldInfo | None) -> bool:
    return field is not None and any(t in (int, float) for t in _plain_types(field.annotation))


def _allowed(field: FieldInfo | None) -> str:
    """Type and range of a plain field in words; '' where pydantic's own words are better."""
    if field is None:
        return ""
    words = []
    for annotation in _plain_types(field.annotation):
        if typing.get_origin(annotation) is Literal:
            words += [repr(value) for value in typing.get_args(annotation)]
        elif annotation in _NAMES:
            words.append(_NAMES[annotation])
        elif words and annotation == list[str]:
            words.append("a list of them")
        else:
            return ""
    signs = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}
    bounds = [
        f"{sign} {getattr(bound, cls.__name__.lower())}"
        for bound in _metadata(field)
        for cls, sign in signs.items()
        if isinstance(bound, cls)
    ]
    return " or ".join(words) + (" " + " and ".join(bounds) if bounds else "")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
