"""Writes JPEG pictures and JSONL files for the data tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

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
