"""Files that are this user's alone (0600): what outsiders said, and logs, which may repeat it."""

from __future__ import annotations

import os
from contextlib import suppress


def private(path: str, flags: int) -> int:
    """`open(..., opener=private)`: nobody else reads the file, whatever bits it had before and
    whatever the umask leaves a new one. (Another user's file, and a file system without such bits,
    stay as they are.)"""
    descriptor = os.open(path, flags, 0o600)
    with suppress(OSError):
        os.fchmod(descriptor, 0o600)
    return descriptor
