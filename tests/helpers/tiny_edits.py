"""Writes JPEG pictures and JSONL files for the data tests, and reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl.api.data import RowRules
from rl.data.rows import BadRowError
from rl.data.sources import EditJsonl

PHOTO_SIZE = (640, 427)


def save_photos(folder: Path) -> None:
    """Writes `china.jpg` and `flower.jpg`, 640x427."""
    for seed, name in enumerate(("china", "flower")):
        blobs = np.random.default_rng(seed).integers(0, 256, (7, 10, 3), np.uint8)
        Image.fromarray(blobs).resize(PHOTO_SIZE).save(folder / f"{name}.jpg", quality=95)


def write_jsonl(path: Path, rows: list[Mapping[str, Any] | str]) -> str:
    """Writes one line per row; strings are written unchanged. Returns the path for a config."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def edits(
    folder: Path, rows: list[Mapping[str, Any] | str], rules: RowRules | None = None, **config: Any
) -> EditJsonl:
    """The source of a new file `edits.jsonl` with these rows."""
    values = {"type": "edit_jsonl", "path": write_jsonl(folder / "edits.jsonl", rows), **config}
    return EditJsonl(EditJsonl.Config.model_validate(values), rules or RowRules())


def complaint(load: Callable[..., object], *arguments: Any, **more: Any) -> str:
    """The message with which a source of data refuses its rows."""
    with pytest.raises(BadRowError) as error:
        load(*arguments, **more)
    return str(error.value)
