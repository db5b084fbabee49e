"""Writing so that a crash leaves the old file or the new one, never half of one.

What: fsync and rename. What not: what is in the files (`checkpoint.py`, `record.py`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def fsync(path: Path) -> None:
    """Push a file or folder to the disk; a rename is only as durable as the folder it is in."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace `path`'s contents, whole or not at all; makes the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    fsync(aside)
    aside.replace(path)
    fsync(path.parent)


def json_line(value: Mapping[str, Any]) -> str:
    """One line of strict JSON: NaN and infinities, which JSON has not, become null.

    Half a surrogate pair, which no UTF-8 file takes, is written as JSON's escape of it.
    """
    line = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    return line.encode("utf-8", "backslashreplace").decode("utf-8") + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
