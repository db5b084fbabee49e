"""Reads files with one row per line, and makes an error message for each unreadable line."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rl.api.data import RowRules
from rl.api.plugin import ConfigT
from rl.config.paths import not_a_file
from rl.data.shared.sample_rows import MAX_SHOWN, BadRowError, RowsSource, shorten
from rl.text.untrusted import excerpt


def read_rows(
    lines: Iterable[tuple[int, bytes]], origin: str, parse: Callable[[str], Any] | None = None
) -> tuple[list[dict[str, Any]], list[int], list[str]]:
    """(the lines that are objects, their numbers, an error message per unreadable line).

    `lines`: (number, line); `origin`: name of their file in messages; `parse`: converts a line to a
    row, None = JSON, where an object with a repeated key is unreadable.
    """
    parse = parse or partial(json.loads, object_pairs_hook=_unique_keys)
    objects: list[dict[str, Any]] = []
    numbers: list[int] = []
    unreadable: list[str] = []
    for number, line in lines:
        try:
            row = parse(line.decode("utf-8"))
        except UnicodeDecodeError:
            unreadable.append(f"{origin}, row {number}: is not UTF-8; save the file as UTF-8")
            continue
        except (ValueError, RecursionError) as error:  # also too long numbers, too deep nesting
            unreadable.append(f"{origin}, row {number}: is not JSON ({error}); one object per line")
            continue
        if not isinstance(row, dict):
            unreadable.append(f'{origin}, row {number}: is not an object {{"key": ...}}')
            continue
        objects.append(row)
        numbers.append(number)
    return objects, numbers, unreadable


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict. Raises ValueError for a repeated key."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in row if names.count(name) > 1)
        raise ValueError(f"it has {repeated!r:.60} twice")
    return row


def read_lines(path: Path) -> list[tuple[int, bytes]]:
    """(number counted from 1, line) of every line that is not blank.

    Raises BadRowError if the file does not exist, is empty or cannot be read.
    """
    if why := not_a_file(path):
        raise BadRowError(
            f"{excerpt(str(path), MAX_SHOWN)} {why}; give the file's path (from {Path.cwd()})"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadRowError(f"{path} cannot be read ({error.strerror})") from error
    # Only a line feed ends a line: a value may hold U+2028 and similar characters.
    lines = enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1)
    numbered = [(number, line.strip()) for number, line in lines if line.strip()]
    if not numbered:
        raise BadRowError(f"{path} is empty; write one row per line")
    return numbered


class LinesSource(RowsSource[ConfigT]):
    """Rows from files with one row per line."""

    @classmethod
    @abstractmethod
    def files(cls, config: ConfigT) -> Sequence[Path]:
        """The files, in order."""

    @classmethod
    def count(cls, config: ConfigT) -> int | None:
        try:
            return sum(len(read_lines(file)) for file in cls.files(config))
        except BadRowError:
            return None

    @classmethod
    def most_pictures(cls, config: ConfigT) -> int | None:
        try:
            return cls.read(config, RowRules()).most_pictures()
        except BadRowError:
            return None

    @classmethod
    def problems(cls, config: ConfigT, rules: RowRules) -> list[str]:
        """All problems of the rows, without opening a picture; with on_bad_row 'skip' the only
        problem is that no row is left."""
        try:
            rows = cls.read(config, rules)
        except BadRowError as error:
            return [str(error)]
        bad = [problem for _, problem in rows.problems("exists")]
        problems = shorten([*rows.unreadable, *bad])
        if rules.on_bad_row == "error":
            return problems
        return [f"{rows.origin}: no row is left:", *problems] if len(bad) == len(rows) else []
