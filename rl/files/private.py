"""Files that are this user's alone (0600): what outsiders said, before anyone has looked at it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO


def open_private(path: Path, mode: str, buffering: int = -1) -> TextIO:
    """`path.open(mode)` as UTF-8 text, readable by nobody else whatever bits the file had or the
    umask leaves. Half characters, which UTF-8 cannot hold, are written as their escapes."""
    file = open(  # noqa: SIM115 - the caller closes it
        path, mode, buffering, encoding="utf-8", errors="backslashreplace", opener=_opener
    )
    os.fchmod(file.fileno(), 0o600)
    return file


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
