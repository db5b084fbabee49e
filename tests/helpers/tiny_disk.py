"""Mounts a small file system in memory and fills it; reads all files of a folder."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Mounts a file system of that size at `folder`; skips the test if that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, left: int = 0) -> Path:
    """Fills the disk with a file except for `left` bytes, a multiple of 4096; returns the file."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 4096):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC
    os.truncate(filler, filler.stat().st_size - left)
    return filler


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file, except of the one that fills the disk."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "filler")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
