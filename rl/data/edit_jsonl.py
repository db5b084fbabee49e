"""Image edits in a JSONL file: one object per line with a picture's path and an instruction.

    {"image": "photos/pagoda.jpg", "instruction": "make it dusk", "id": "p-1", "category": "light"}

Plug of `rl/data`. What: reading and checking the file. What not: pictures and columns, see
`_rows.py`. UTF-8 with or without a byte-order mark, any line ending; blank lines are ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl.config import Section
from rl.data._rows import BadRowError, Columns, OnBadRow, PictureCheck, Rows, shorten


class Config(Section):
    """One JSONL file."""

    type: str
    """This plug's name."""
    path: str
    """The file; a relative path counts from the working directory."""
    image_folder: str = ""
    """Where relative picture paths count from; '' = the file's own folder."""
    columns: Columns = Columns()
    """Which key of a line is what."""
    picture_check: PictureCheck = "header"
    """How far every picture is read at start. exists: not at all; header: format and size, about
    0.3 ms each; pixels: decoded, about 50 ms per megapixel, which alone finds truncated files."""


def provides(config: Config) -> frozenset[str]:
    """What this config's samples carry, in the words of a reward's `NEEDS`."""
    return config.columns.provides()


def count(config: Config) -> int | None:
    """Rows in the file, bad ones included; None when there is no file or nothing in it."""
    path = Path(config.path)
    return sum(map(bool, map(bytes.strip, _lines(path)))) or None if path.is_file() else None


def check(config: Config, on_bad_row: OnBadRow, max_image_side_px: int) -> list[str]:
    """Everything that is wrong with the file, without opening a picture."""
    try:
        rows, unreadable = read(config, max_image_side_px)
    except BadRowError as error:
        return [str(error)]
    problems = unreadable + [problem for _, problem in rows.problems("exists")]
    if on_bad_row == "error":
        return shorten(problems)
    num_good = len(rows) + len(unreadable) - len(problems)
    return [] if num_good else [f"{config.path}: no row is left:", *shorten(problems)]


def build(config: Config, on_bad_row: OnBadRow, max_image_side_px: int) -> Rows:
    """The file as a `DataSource`. Raises BadRowError (a ValueError) naming file and rows."""
    rows, unreadable = read(config, max_image_side_px)
    rows.keep_good(on_bad_row, config.picture_check, unreadable)
    return rows


def read(config: Config, max_image_side_px: int) -> tuple[Rows, list[str]]:
    """The lines that are JSON objects, and a sentence for each that is not."""
    path = Path(config.path)
    if not path.is_file():
        raise BadRowError(f"{path} does not exist; give the JSONL file's path (from {Path.cwd()})")
    folder = Path(config.image_folder) if config.image_folder else path.parent
    objects: list[dict[str, Any]] = []
    numbers: list[int] = []
    unreadable: list[str] = []
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            unreadable.append(f"{path}, row {number}: is not UTF-8; save the file as UTF-8")
            continue
        except json.JSONDecodeError as error:
            unreadable.append(f"{path}, row {number}: is not JSON ({error}); one object per line")
            continue
        if not isinstance(row, dict):
            unreadable.append(f'{path}, row {number}: is not an object {{"image": ...}}')
            continue
        objects.append(row)
        numbers.append(number)
    if not objects and not unreadable:
        raise BadRowError(f"{path} is empty; write one JSON object per line")
    rows = Rows(objects, numbers, str(path), config.columns, folder, max_image_side_px)
    return rows, unreadable


def _lines(path: Path) -> list[bytes]:
    # Split as bytes: str.splitlines would also cut at U+2028, which JSON allows inside a string.
    return path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
