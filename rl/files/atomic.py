"""Writes files completely or not at all, even in a crash; reads JSONL without damaged lines."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any

from rl.config.paths import read_bytes
from rl.files.held import current_path
from rl.files.private import no_links

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, an exhausted quota and the largest size of a file."""

MAX_NESTING = 64
"""Levels of objects and lists; a run's own files have a dozen."""

MAX_ROWS_BYTES = 4 * 10**9
"""Of a JSONL file, which is read as a whole."""

_LINE_ENDS = re.compile("[\x85\u2028\u2029\ud800-\udfff]")
"""Line ends of `str.splitlines` that JSON does not escape, and surrogates, which UTF-8 cannot
encode."""


def fsync(path: Path) -> None:
    """Push a file or folder to the disk; a rename is only as durable as the folder it is in."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(
    path: Path,
    content: str | bytes,
    opener: Callable[[str, int], int] = no_links,
    *,
    durable: bool = True,
) -> None:
    """Replace `path`'s contents completely or not at all; creates the folders above it. `opener` as
    in `open`. Without `durable` a power failure may lose the file. Raises GoneError (`held.py`) and
    other OSErrors, which name the path."""
    path = current_path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    with _with_path_in_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _opened_exclusively(temporary, opener) as file:
            try:
                append(file, content.encode() if isinstance(content, str) else content)
                if durable:
                    os.fsync(file.fileno())
                temporary.replace(path)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                raise
        if durable:
            fsync(path.parent)


@contextmanager
def _opened_exclusively(temporary: Path, opener: Callable[[str, int], int]) -> Iterator[FileIO]:
    """Opens `temporary`, emptied; no other process or thread writes to it until it is renamed or
    removed. A file that a killed process left behind is reused."""
    while True:
        descriptor = opener(str(temporary), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with open(descriptor, "ab", buffering=0) as file:
            with suppress(OSError):  # some file systems have no locks: write anyway
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                is_current = os.path.samestat(os.fstat(descriptor), os.lstat(temporary))
            except FileNotFoundError:
                is_current = False
            if is_current:
                file.truncate(0)
                yield file
                return


@contextmanager
def _with_path_in_errors(path: Path) -> Iterator[None]:
    """Adds the path to an OSError: one from a file that is already open names no path."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def json_line(value: Mapping[str, Any]) -> str:
    """Strict JSON that every reader takes as one line; NaN and infinities become null."""
    text = json.dumps(with_leaves(value, _finite), ensure_ascii=False, allow_nan=False)
    return _LINE_ENDS.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


def append_line(path: Path, line: str) -> None:
    """Append a line, after a line feed if the file ends in an incomplete line. A failed write does
    not change the file. Raises the same errors as `write_atomically`."""
    path = current_path(path)
    with _with_path_in_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = no_links(str(path), os.O_RDWR | os.O_APPEND | os.O_CREAT)
        with open(descriptor, "a+b", buffering=0) as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = "\n" + line
            append(file, line.encode())


def append(file: FileIO, data: bytes) -> None:
    """Append all of `data` or nothing to a file that was opened without a buffer."""
    end = file.seek(0, os.SEEK_END)
    remaining = memoryview(data)
    try:
        while remaining:
            remaining = remaining[file.write(remaining) :]
    except OSError:
        file.truncate(end)
        raise


def lines_of(path: Path) -> list[bytes]:
    """The lines of a file, ends included; none if there is no file. Only b'\\n' ends a line: values
    may hold U+2028 or a lone \\r. Raises OSError as `read_bytes`."""
    try:
        return BytesIO(read_bytes(path, MAX_ROWS_BYTES)).readlines()
    except FileNotFoundError:
        return []


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, as `row_of`. Raises OSError as `read_bytes`."""
    return row_of(read_bytes(path))


def row_of(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None for anything else and for an object that is nested too deeply
    for recursion."""
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    # Each level needs a bracket, so only lines with many brackets have to be walked.
    brackets = line.count(b"[") + line.count(b"{")
    if brackets > MAX_NESTING and _is_deeper(row, MAX_NESTING):
        return None
    return row if isinstance(row, dict) else None


def _is_deeper(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(layer)


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The objects of a JSONL file, and the numbers (from 1) of damaged lines; blank lines are
    neither."""
    rows: list[dict[str, Any]] = []
    damaged: list[int] = []
    for number, line in enumerate(lines_of(path), start=1):
        row = row_of(line)
        if row is not None:
            rows.append(row)
        elif line.strip():
            damaged.append(number)
    return rows, damaged


def with_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a JSON-like `value` with `change` applied to each key and to each value that is
    neither an object nor a list."""
    if isinstance(value, (list, tuple)):
        return [with_leaves(item, change) for item in value]
    if isinstance(value, (str, int, float)) or not isinstance(value, Mapping):  # the slowest last
        return change(value)
    return {change(key): with_leaves(item, change) for key, item in value.items()}


def _finite(leaf: Any) -> Any:
    return None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf
