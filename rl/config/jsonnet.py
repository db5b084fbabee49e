"""Evaluates a Jsonnet file with the command line's overrides; each error names file and line."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Callable, Mapping, Sequence
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
_MARKED = """
local marked(x) =
  if std.isObject(x) then
    x { '+':: true } { [k]: marked(super[k]) for k in std.objectFields(x) }
  else x;
local base = import %s;
if std.isObject(base) then marked(base) { '+base':: { name: %s, base: base } } else base
"""
"""Jsonnet that imports a file, with a hidden key in each of its sections: a config that changes
such a section with `+` has the key, too."""
_OWN_AND_BASE = """
local shown(x) =
  if std.isObject(x) then
    { [k]: shown(x[k]) for k in std.objectFields(x) + ['+'] if std.objectHasAll(x, k) }
  else x;
local from =
  if std.objectHasAll(config, '+base') then config['+base']
  else { name: 'base.libsonnet', base: import %s };
local names = { [k]: config[k] for k in ['run_name', 'base_exp_dir'] if std.objectHas(config, k) };
from { own: shown(config), base+: names }
"""
"""Jsonnet for what `own_and_base` returns."""
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
    **how: Any,
) -> tuple[dict[str, Any] | None, list[str]]:
    """(the file's values with the overrides, None if it cannot be evaluated; all problems).

    `stored`: the values to change; None: those of the file. `result`: what to return, in Jsonnet.
    `how`: arguments of `_jsonnet`.
    A missing environment variable is a problem; its name replaces its value, so that the rest of
    the file is still checked. Imports that are not found beside the importing file come from the
    shipped configs (`base.libsonnet`).
    """
    try:  # in a thread, because no signal interrupts Jsonnet, which is C++
        with ThreadPool(1) as pool:
            job = pool.apply_async(_evaluate, (path, overrides, env, stored, result, how))
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


def own_and_base(path: Path, overrides: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """`own`, the values of the file at `path`, and `base` and its `name`, those of the file upon
    which its object is built, `(import 'base.libsonnet') + { ... }`; without one, the defaults. A
    section of `own` that has a key '+' is a changed one of `base`. {} if `base` has errors."""
    path = path.resolve()
    own = f"{path.parent}/./"  # Jsonnet names only the importing file's folder
    first: dict[str, Path] = {}

    def find(folder: str, name: str) -> tuple[str, bytes]:
        file = next(f for f in (Path(folder, name), configs_folder() / name) if f.is_file())
        is_jsonnet = file.suffix in (".json", ".jsonnet", ".libsonnet")  # not `importstr`
        if folder == own and is_jsonnet and first.setdefault(own, file) == file:
            return str(file), (_MARKED % (json.dumps(str(file)), json.dumps(file.name))).encode()
        return (f"{own}{path.name}" if file == path else str(file)), file.read_bytes()

    defaults = json.dumps(str(configs_folder() / "base.libsonnet"))
    return (
        evaluate(path, overrides, env, result=_OWN_AND_BASE % defaults, import_callback=find)[0]
        or {}
    )


def _evaluate(
    path: Path,
    overrides: Sequence[str],
    env: Mapping[str, str],
    stored: Mapping[str, Any] | None,
    result: str,
    how: Mapping[str, Any],
) -> tuple[str | None, list[str]]:
    """(JSON or None, problems)."""
    variables = {name: value for name, value in env.items() if name.startswith("APP__")}
    problems = []

    def run(text: str) -> str:
        # mypy knows no types of `_jsonnet`.
        return str(
            _jsonnet.evaluate_snippet(
                "overrides", text, ext_vars=variables, jpathdir=[str(configs_folder())], **how
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
