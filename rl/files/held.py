"""A folder in use that may be moved or deleted meanwhile: found again, and never made anew."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_held: dict[Path, int] = {}


class GoneError(FileNotFoundError):
    """A held folder is not where it was."""


def hold(folder: Path) -> None:
    """Until `release`, `place` knows this folder, wherever it is moved."""
    release(folder)
    _held[folder] = os.open(folder, os.O_PATH | os.O_DIRECTORY)


def release(folder: Path) -> None:
    if (descriptor := _held.pop(folder, None)) is not None:
        os.close(descriptor)


def place(path: Path) -> Path:
    """Where to write `path`: below a held folder that was moved, its place in there now. Raises
    GoneError below one that was deleted."""
    for folder, descriptor in _held.items():
        if folder not in (path, *path.parents):
            continue
        for now in (folder, Path(os.readlink(f"/proc/self/fd/{descriptor}"))):
            with suppress(OSError):
                if os.path.samestat(os.stat(now), os.fstat(descriptor)):
                    return now / path.relative_to(folder)
        raise GoneError(
            f"{folder} is gone: it was deleted, or moved to another disk, while the run was using "
            "it. Nothing is written there any more, and what was not in it yet is lost. With a "
            "copy put back there, the same command goes on from its last checkpoint; else it "
            "begins anew"
        )
    return path


def require_in_place(folder: Path) -> None:
    """Raises GoneError when the held `folder` was moved or deleted."""
    now = place(folder)
    if now != folder:
        other = f"remove what is at {folder} now, move" if folder.exists() else "move"
        raise GoneError(
            f"{folder} is gone: it was moved to {now} while the run was using it. The finished "
            f"iterations are saved there: {other} it back, and the same command goes on"
        )
