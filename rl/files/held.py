"""Follows a folder in use if it is moved, and raises GoneError if it is deleted."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_held: dict[Path, int] = {}


class GoneError(FileNotFoundError):
    """A held folder was deleted, or moved where it must not be."""


def hold(folder: Path) -> None:
    """Until `release`, `current_path` follows this folder wherever it is moved."""
    release(folder)
    _held[folder] = os.open(folder, os.O_PATH | os.O_DIRECTORY)


def release(folder: Path) -> None:
    if (descriptor := _held.pop(folder, None)) is not None:
        os.close(descriptor)


def current_path(path: Path) -> Path:
    """The path to write to instead of `path`: below a held folder that was moved, the path in the
    moved folder. Raises GoneError if that folder was deleted."""
    for folder, descriptor in _held.items():
        if folder not in (path, *path.parents):
            continue
        for current in (folder, Path(os.readlink(f"/proc/self/fd/{descriptor}"))):
            with suppress(OSError):
                if os.path.samestat(os.stat(current), os.fstat(descriptor)):
                    return current / path.relative_to(folder)
        raise GoneError(
            f"{folder} is gone: it was deleted, or moved to another disk, while the run was using "
            "it. Nothing more is written, and what had not been written yet is lost. With a copy "
            "in its place, the same command resumes from its last checkpoint; without one it "
            "starts from the beginning"
        )
    return path


def require_not_moved(folder: Path) -> None:
    """Raise GoneError if the held `folder` was moved or deleted."""
    current = current_path(folder)
    if current != folder:
        move = f"remove what is at {folder} now, move" if folder.exists() else "move"
        raise GoneError(
            f"{folder} is gone: it was moved to {current} while the run was using it. The finished "
            f"iterations are saved there: {move} it back, and the same command resumes"
        )
