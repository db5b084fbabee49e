"""A file of lines as rows: what is readable, and a sentence for each line that is not.

UTF-8 with or without a byte-order mark, blank lines ignored. A line feed ends a line, and nothing
else that Python takes for an end: a value may hold U+2028 and the like.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.api.data import OnBadRow
from rl.data.shared.rows import BadRowError, Rows, shorten


def read_jsonl(path: Path) -> tuple[list[dict[str, Any]], list[int], list[str]]:
    """(the lines that are objects, their numbers counted from 1, a sentence per unreadable line).

    Raises BadRowError when there is no such file, or nothing in it.
    """
    objects: list[dict[str, Any]] = []
    numbers: list[int] = []
    unreadable: list[str] = []
    for number, line in read_lines(path):
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            unreadable.append(f"{path}, row {number}: is not UTF-8; save the file as UTF-8")
            continue
        except (ValueError, RecursionError) as error:  # numbers and nestings without end, too
            unreadable.append(f"{path}, row {number}: is not JSON ({error}); one object per line")
            continue
        if not isinstance(row, dict):
            unreadable.append(f'{path}, row {number}: is not an object {{"key": ...}}')
            continue
        objects.append(row)
        numbers.append(number)
    return objects, numbers, unreadable


def read_lines(path: Path) -> list[tuple[int, bytes]]:
    """(number counted from 1, line) of every line that is not blank. Raises as above."""
    if not path.is_file():
        raise BadRowError(f"{path} does not exist; give the file's path (from {Path.cwd()})")
    numbered = numbered_lines(path.read_bytes())
    if not numbered:
        raise BadRowError(f"{path} is empty; write one row per line")
    return numbered


def numbered_lines(content: bytes) -> list[tuple[int, bytes]]:
    """(number counted from 1, line) of every line that is not blank."""
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


def count_lines(path: Path) -> int | None:
    """Lines that are not blank; None when there is no file or nothing in it."""
    try:
        return len(read_lines(path))
    except BadRowError:
        return None


def row_problems(
    rows: Rows, unreadable: Sequence[str], on_bad_row: OnBadRow, origin: str
) -> list[str]:
    """What a config check says of them, without opening a picture; under 'skip' only that nothing
    is left."""
    problems = [*unreadable, *(problem for _, problem in rows.problems("exists"))]
    if on_bad_row == "error":
        return shorten(problems)
    num_good = len(rows) + len(unreadable) - len(problems)
    return [] if num_good else [f"{origin}: no row is left:", *shorten(problems)]
