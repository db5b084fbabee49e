"""A Jsonnet file and the command line's overrides, as plain values; a mistake is a sentence that
names its place."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _jsonnet

from rl.config.imports import Importer
from rl.config.limits import RunawayError, within_limits

_SET = """
local set(x, path, value, key) =
  if path == [] then value
  else if std.isObject(x) then
    x { [path[0]]: set(if path[0] in super then super[path[0]] else {}, path[1:], value, key) }
  else if std.isArray(x) then
    assert std.member([std.toString(i) for i in std.range(0, std.length(x) - 1)], path[0])
           : "override %s: no entry %s; the list's %d entries are counted from 0"
             % [key, path[0], std.length(x)];
    std.mapWithIndex(
      function(i, item)
        if path[0] == std.toString(i) then set(item, path[1:], value, key) else item,
      x
    )
  else error 'override %s: %s lies in a plain value, not in a section' % [key, path[0]];
"""
"""An override as Jsonnet: rebuilt with `super`, so that the file's own references see it."""

MAX_MISSING = 100
"""Variables that are looked for: a name made from a missing one's stand-in has no end."""


def evaluate(
    path: Path, overrides: Sequence[str], env: Mapping[str, str]
) -> tuple[dict[str, Any] | None, list[str]]:
    """The file with its overrides as plain values. A missing variable is noted and stood in for,
    so that the rest of the file is still checked. What it imports and its own folder lacks
    (`base.libsonnet`) comes from the shipped configs; nothing comes from outside its project. What
    runs away is ended (`limits.py`)."""
    try:
        answer = within_limits(lambda: json.dumps(_evaluate(path, overrides, env)))
    except RunawayError as error:
        return None, [f"{path}{' with its overrides' if overrides else ''}: {error}"]
    values, problems = json.loads(answer)
    return values, problems


def _evaluate(
    path: Path, overrides: Sequence[str], env: Mapping[str, str]
) -> tuple[dict[str, Any] | None, list[str]]:
    if not _is_utf8(str(path.resolve())):
        return None, [f"{str(path)!r}: a config's path has to be UTF-8; rename the file or folder"]
    try:
        importer = Importer(path, env)
    except ValueError as error:
        return None, [str(error)]
    variables = {
        name: value
        for name, value in env.items()
        if name.startswith("APP__") and _is_utf8(name + value)
    }
    problems = []
    text = f"import {json.dumps(str(path.resolve()))}"
    for override in overrides:
        key, equals, value = override.partition("=")
        if not _is_utf8(override):
            problems.append(f"override {override!r}: is not UTF-8; write it as UTF-8")
            continue
        if not equals or not all(key.split(".")):
            problems.append(f"override {override!r}: write key.sub=value")
            continue
        try:
            literal = _jsonnet_value(value, variables, env, importer)
        except ValueError as error:
            problems.append(f"override {key}: {error}")
            continue
        text = f"set({text}, {json.dumps(key.split('.'))}, {literal}, {json.dumps(key)})"
    for _ in range(MAX_MISSING):  # Jsonnet tells of one at a time
        try:
            values = json.loads(
                _jsonnet.evaluate_snippet(
                    "overrides", _SET + text, ext_vars=variables, import_callback=importer
                )
            )
        except RecursionError:
            return None, [f"{path}: is nested without end; no config is"]
        except RuntimeError as error:
            name = _undefined(str(error))
            if name is None or name in variables:
                # With stand-ins in place, what Jsonnet says next may be their fault.
                return None, problems or [_jsonnet_problem(str(error), path)]
            variables[name] = name
            problems.append(_missing_variable(name, str(error), env))
            continue
        if isinstance(values, dict):
            return values, problems
        return None, [f"{path}: a config is an object {{ ... }}, this is a {type(values).__name__}"]
    return None, problems


def _is_utf8(text: str) -> bool:
    """Bytes that are not come from a shell as lone surrogates, which Jsonnet cannot be given."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _jsonnet_value(
    text: str, variables: Mapping[str, str], env: Mapping[str, str], importer: Importer
) -> str:
    """An override's right-hand side as a JSON literal."""
    if re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?|true|false|null", text, re.ASCII):
        return text  # Jsonnet would take 0.05 s
    known = dict(variables)
    try:
        return str(
            _jsonnet.evaluate_snippet("value", text, ext_vars=known, import_callback=importer)
        )
    except RuntimeError as error:
        name = _undefined(str(error))
        if name is not None:
            raise ValueError(_missing_variable(name, "", env)) from error
        if text[:1] in ("{", "[", "'", '"') or re.search(
            "external variable|couldn.t open import", str(error)
        ):
            raise ValueError(f"{text} is not Jsonnet: {_message(str(error))}") from error
        return json.dumps(text)


def _undefined(error: str) -> str | None:
    """The name of the external variable that Jsonnet misses, whatever characters it has."""
    before, told, name = _message(error).partition("undefined external variable: ")
    return name if told and not before else None


def _missing_variable(name: str, error: str, env: Mapping[str, str]) -> str:
    used = f" (used at {_place(error)})" if _place(error) else ""
    if not name.startswith("APP__"):
        return f"std.extVar({name!r}){used}: only environment variables named APP__... can be read"
    if name in env:
        return f"the environment variable {name}{used} is not UTF-8; set it anew"
    if not re.fullmatch(r"\w+", name, re.ASCII):
        settable = re.sub(r"\W", "_", name, flags=re.ASCII)
        return (
            f"std.extVar({name!r}){used}: no shell sets a variable of that name; use letters, "
            f"digits and underscores, std.extVar({settable!r}), and set that"
        )
    return f"set the environment variable {name}{used}"


def _message(error: str) -> str:
    """What Jsonnet says, without the frames below it."""
    return re.sub(r"^(RUNTIME|STATIC) ERROR: ", "", error.partition("\n\t")[0]).rstrip("\n")


def _jsonnet_problem(error: str, path: Path) -> str:
    message, place = _message(error), _place(error)
    if message.startswith("override ") or (place and place in message):
        return message
    return f"{message} (at {place})" if place else f"{path}: {message}"


def _place(error: str) -> str:
    """file:line of the first frame of a Jsonnet error that lies in a file."""
    for file, line in re.findall(r"(?:^\t|: )([^\t\n:]+):\(?(\d+):", error, re.MULTILINE):
        if Path(file).is_file():
            near = os.path.relpath(file)
            return f"{file if near.startswith('..') else near}:{line}"
    return ""
