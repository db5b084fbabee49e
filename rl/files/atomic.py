"""Files that survive a crash: written whole or not at all, read line by line whatever one holds."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LINE_ENDS = re.compile("[\x85\u2028\u2029\ud800-\udfff]")
"""What `str.splitlines` takes for the end of a line and JSON does not escape by itself; and half
characters, which a judge may spell in JSON and UTF-8 cannot hold."""


def fsync(path: Path) -> None:
    """Push a file or folder to the disk; a rename is only as durable as the folder it is in."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path`'s contents, whole or not at all; makes the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_bytes(content.encode() if isinstance(content, str) else content)
    fsync(aside)
    aside.replace(path)
    fsync(path.parent)


def json_line(value: Mapping[str, Any]) -> str:
    """One line of strict JSON, whatever its reader takes for the end of one: NaN and infinities,
    which JSON has not, become null."""
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    return _LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def append_line(path: Path, line: str) -> None:
    """Add a line to a file that may end in half of one, which is left as a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())


def lines_of(path: Path) -> list[bytes]:
    """The lines of a file with their ends, which are b'\\n' and nothing else: a value may hold any
    other character that Python takes for one (U+2028, a lone \\r)."""
    with path.open("rb") as file:
        return file.readlines()


def row_of(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None for anything else."""
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The objects of a JSONL file, and the numbers (from 1) of the lines that hold none; blank
    lines are neither."""
    rows: list[dict[str, Any]] = []
    damaged: list[int] = []
    for number, line in enumerate(lines_of(path), start=1):
        row = row_of(line)
        if row is not None:
            rows.append(row)
        elif line.strip():
            damaged.append(number)
    return rows, damaged


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
