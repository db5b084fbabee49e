"""Locks `<run>/report/` for one process at a time, and refuses symbolic links in it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rl.files import private_folder

MAX_WAIT_S = 30.0
"""Longest wait for another report on this run; shorter than a run's limit for its last page."""
_POLL_S = 0.1


class BusyError(ValueError):
    """Another report on the same run is being made."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other reports. Raises ValueError if the folder, its `data` or an
    entry of either is a symbolic link, BusyError if it stays locked for `MAX_WAIT_S`."""
    for inner in (folder, folder / "data"):
        entries = inner.iterdir() if inner.is_dir() and not inner.is_symlink() else ()
        for path in (inner, *entries):
            if path.is_symlink():
                raise ValueError(
                    f"{path} is a link, which might lead out of the run folder; remove it"
                )
    private_folder(folder)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / ".lock", flags, 0o600)
    until_s = time.monotonic() + MAX_WAIT_S
    try:
        with suppress(OSError):  # a file system without locks
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until_s:
                        raise BusyError(f"{folder}: another report is being made there") from None
                    time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)
