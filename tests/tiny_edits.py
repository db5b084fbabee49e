"""Writes real photographs and JSONL files for the data tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from sklearn.datasets import load_sample_images

PHOTO_SIZE = (640, 427)


def save_photos(folder: Path) -> None:
    """Writes `china.jpg` and `flower.jpg`, 640x427."""
    for name, pixels in zip(("china", "flower"), load_sample_images().images, strict=True):
        Image.fromarray(pixels).save(folder / f"{name}.jpg", quality=95)


def write_jsonl(path: Path, rows: list[Mapping[str, Any] | str]) -> str:
    """Writes one line per row; strings are written unchanged. Returns the path for a config."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)
