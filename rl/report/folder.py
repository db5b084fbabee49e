"""`<run>/report/` while it is written: without links, and by one process at a time.

What: `to_oneself`, `refuse_links`. What not: what is written there (`page.py`, `mail.py`,
`figures.py`).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_WAIT_S = 30.0
"""For another report on the same run; less than a run waits for its last page."""
_POLL_S = 0.1


def refuse_links(folder: Path) -> None:
    """Raises ValueError where the folder, its `data`, or an entry of either is a link."""
    data = folder / "data"
    for path in (folder, data, *_entries(folder), *_entries(data)):
        if path.is_symlink():
            raise ValueError(f"{path} is a link, and a report writes to no other place; remove it")


def _entries(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.is_dir() and not folder.is_symlink() else iter(())


@contextmanager
def to_oneself(folder: Path) -> Iterator[None]:
    """Inside, no other report writes there. Raises ValueError for a link, and where another takes
    longer than `MAX_WAIT_S`."""
    refuse_links(folder)
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / ".lock", flags, 0o600)
    try:
        _wait(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _wait(descriptor: int, folder: Path) -> None:
    until_s = time.monotonic() + MAX_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise ValueError(f"{folder}: another report is being made there") from None
            time.sleep(_POLL_S)
        except OSError:  # a file system without locks
            return
