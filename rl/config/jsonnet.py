"""Evaluates a Jsonnet file with the command line's overrides; each error names file and line."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import _jsonnet

from rl.config.shipped import configs_folder

MAX_S = 10.0
"""Time limit for a config; usually it takes a fifth of a second."""
MAX_PARTS = 20
"""Limit of an override's key; Jsonnet takes ever longer for each part."""
MAX_MISSING = 20
"""Limit of missing variables to report: a file could name endlessly many."""

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
  else error 'override %s: %s is in a plain value, not in a section' % [key, path[0]];
"""
"""Jsonnet that applies an override through `super`: the file's own `self` references see it."""
_NAMES = ["run_name", "base_exp_dir"]
_ALONE = """
local base = import %s;
base + { [k]: config[k] for k in %s if std.objectHas(config, k) }
"""
_HERE = """
local base = import %s;
local keys = %s;
local kept(x, own) =
  if std.isObject(x) && std.isObject(own) then {
    [k]: if std.objectHas(own, k) then kept(x[k], own[k]) else x[k]
    for k in std.objectFields(x)
    if std.objectHas(own, k) || !std.objectHasAll(own, k)
  } else x;
local here(key) =
  (base + { [k]: config[k] for k in std.objectFieldsAll(config) if k != key })[key];
{ [k]: kept(here(k), config[k]) for k in std.objectFields(base) if std.member(keys, k) }
"""
"""Jsonnet for the fields of `Base`."""
_PLAIN = re.compile(r"-?(0|[1-9]\d{0,99})(\.\d{1,99})?|true|false|null", re.ASCII)
"""Numbers that do not overflow and constants, which JSON and Jsonnet write alike."""
_WORD = re.compile(r"(?!(std|true|false|null)\b)[A-Za-z_/.][\w./:~-]*|\d+(-\d+)+", re.ASCII)
"""Names and paths, which Jsonnet refuses (`cuda`, `runs/mine`), and dates, which it subtracts."""
_OF_TEXT = re.compile(
    r"^(binary operator . requires matching types|condition must be bool).*string"
)


def evaluate(
    path: Path,
    overrides: Sequence[str],
    env: Mapping[str, str],
    stored: Mapping[str, Any] | None = None,
    result: str = "config",
) -> tuple[dict[str, Any] | None, list[str]]:
    """(the file's values with the overrides, None if it cannot be evaluated; all problems).

    `stored`: the values to change; None: those of the file. `result`: what to return, in Jsonnet.
    A missing environment variable is a problem; its name replaces its value, so that the rest of
    the file is still checked. Imports that are not found beside the importing file come from the
    shipped configs (`base.libsonnet`).
    """
    try:  # in a thread, because no signal interrupts Jsonnet, which is C++
        with ThreadPool(1) as pool:
            job = pool.apply_async(_evaluate, (path, overrides, env, stored, result))
            text, problems = job.get(MAX_S)
        values = None if text is None else json.loads(text)
    except multiprocessing.TimeoutError:
        reason = f"took longer than {MAX_S:g} s: a recursion or list without end, or a huge import?"
        return None, [f"{path} with its overrides: {reason}"]
    except RecursionError:
        return None, [f"{path}: holds lists or sections that are nested too deeply; flatten it"]
    if values is None or isinstance(values, dict):
        return values, problems
    return None, [f"{path}: a config is an object {{ ... }}, not of type {type(values).__name__}"]


@dataclass(frozen=True)
class Base:
    """A file that a config is built upon."""

    name: str
    values: Mapping[str, Any]
    """Its values, with the config's `run_name` and `base_exp_dir`."""
    sections: Mapping[str, Any]
    """Its value of each section in which the config lacks a key, if the config gives all other
    sections theirs: what it derives from them is as in the config. Without keys that the config
    hides (`zero_stage:: null`)."""


def built_upon(
    path: Path, overrides: Sequence[str], env: Mapping[str, str], own: Mapping[str, Any]
) -> list[Base]:
    """The files that the object in the file `path` is built upon, `(import 'base.libsonnet') + {
    ... }`, if its values are `own`. Without files that are no object, and without imports that
    only give a value to a key."""
    path, files = path.resolve(), []
    marked = f"{path.parent}/./"  # Jsonnet names only the importing file's folder

    def find(folder: str, name: str) -> tuple[str, bytes]:
        if not folder:
            return marked + path.name, path.read_bytes()
        if folder != marked:  # what a base imports takes time, and changes nothing here
            return name, b"{}"
        file = next(f for f in (Path(folder, name), configs_folder() / name) if f.is_file())
        files.extend([file] if file not in files else [])
        return str(file), file.read_bytes()

    with suppress(RuntimeError):  # looks at no key, so that only what makes the object is read
        _jsonnet.evaluate_snippet(
            "", "std.type(import 'x')", import_callback=find, ext_vars=_variables(env)
        )
    bases = []
    for file in files:
        name = json.dumps(str(file))
        values, _ = evaluate(path, overrides, env, result=_ALONE % (name, _NAMES))
        # Without values, the file is incomplete by itself.
        keys = [key for key in own if values is None or _lacks(own[key], values.get(key))]
        result = _HERE % (name, [key for key in keys if key not in _NAMES])
        here = evaluate(path, overrides, env, result=result)[0] if keys else None
        if values or here:
            bases.append(Base(file.name, values or here or {}, here or {}))
    return bases


def _lacks(own: Any, base: Any) -> bool:
    """Whether a section of `base` has a key that the same section of `own` has not."""
    if not (isinstance(own, dict) and isinstance(base, dict)):
        return False
    return any(key not in own or _lacks(own[key], value) for key, value in base.items())


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith("APP__")}


def _evaluate(
    path: Path,
    overrides: Sequence[str],
    env: Mapping[str, str],
    stored: Mapping[str, Any] | None,
    result: str,
) -> tuple[str | None, list[str]]:
    """(JSON or None, problems)."""
    variables = _variables(env)
    problems = []

    def run(text: str) -> str:
        # mypy knows no types of `_jsonnet`.
        return str(
            _jsonnet.evaluate_snippet(
                "overrides", text, ext_vars=variables, jpathdir=[str(configs_folder())]
            )
        )

    try:
        "".join((str(path), *overrides)).encode()
        file = f"import {json.dumps(str(path.resolve()))}" if stored is None else json.dumps(stored)
        text = file
        for override in overrides:
            key, equals, value = override.partition("=")
            if not equals or not all(key.split(".")) or key.count(".") >= MAX_PARTS:
                problems.append(
                    f"override {override!r:.200}: write key.sub=value, {MAX_PARTS} keys at most"
                )
                continue
            try:
                literal = _literal(value, run)
            except ValueError as error:
                problems.append(f"override {key}: {error}")
                continue
            text = f"set({text}, {json.dumps(key.split('.'))}, {literal}, {json.dumps(key)})"
        text = f"local config = if std.isObject({file}) then {text} else {file}; {result}"
        for _ in range(MAX_MISSING):  # Jsonnet reports one at a time
            try:
                return run(_SET + text), problems
            except RuntimeError as error:
                message, where = _message(str(error)), _position(str(error))
                before, is_undefined, name = message.partition("undefined external variable: ")
                if before or not is_undefined or name in variables:
                    if problems:  # the stand-in values may have caused this error
                        return None, problems
                    is_placed = message.startswith("override ") or (where and where in message)
                    located = f"{message} (at {where})" if where else f"{path}: {message}"
                    return None, [message if is_placed else located]
                variables[name] = name
                usage = f" (used at {where})" if where else ""
                problems.append(
                    f"set the environment variable {name}{usage}"
                    if name.startswith("APP__")
                    else f"std.extVar({name!r}){usage}: only environment variables named APP__... "
                    "can be read"
                )
    except UnicodeError:
        problems.append(
            f"{path}: its path, an override or an APP__ variable is not UTF-8, or this locale is "
            "not (PYTHONUTF8=1)"
        )
    return None, problems


def _literal(text: str, run: Callable[[str], str]) -> str:
    """An override's right-hand side as JSON; text that is not valid Jsonnet becomes a string.

    Raises ValueError for text that is clearly meant as Jsonnet but cannot be evaluated.
    """
    if _PLAIN.fullmatch(text):  # Jsonnet would take 0.05 s
        return text
    if _WORD.fullmatch(text):
        return json.dumps(text)
    try:
        return run(text)
    except RuntimeError as error:
        message = _message(str(error))
        is_jsonnet = text.startswith(("{", "[", "'", '"')) or re.search(
            "external variable|couldn.t open import|std.extVar gives", message
        )
        if is_jsonnet:
            raise ValueError(f"{text} cannot be evaluated: {message}") from error
        return json.dumps(text)


def _message(error: str) -> str:
    """Jsonnet's message without its stack frames."""
    error = re.sub(r"^(RUNTIME|STATIC) ERROR: ", "", error.partition("\n\t")[0]).rstrip("\n")
    error = re.sub("^overflow$", "a number is too large (overflow)", error)
    if _OF_TEXT.match(error):
        error += " std.extVar gives text: write std.parseJson(std.extVar(...))"
    if error.endswith("character code 239"):
        error += ": a byte order mark; save the file as UTF-8 without one"
    return error


def _position(error: str) -> str:
    """file:line of the first stack frame of a Jsonnet error that is in a file."""
    for file, line in re.findall(r"(?:^\t|: )([^\t\n:]+):\(?(\d+):", error, re.MULTILINE):
        if Path(file).is_file():
            relative = os.path.relpath(file)
            return f"{file if relative.startswith('..') else relative}:{line}"
    return ""
