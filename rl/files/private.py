"""How a file of ours is opened to be written: itself, never what a link leads to; and for this user
alone (0600) where it holds what outsiders said, or logs, which may repeat it."""

from __future__ import annotations

import errno
import os
from contextlib import suppress


def itself(path: str, flags: int, mode: int = 0o666) -> int:
    """`open(..., opener=itself)`: a folder that came from elsewhere may hold links in the place of
    what is written there. Raises OSError (ELOOP) for one."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        why = "it is a link, and what is written here goes to no other place; remove it"
        raise OSError(errno.ELOOP, why, str(path)) from None


def private(path: str, flags: int) -> int:
    """`open(..., opener=private)`: as `itself`, and nobody else reads the file, whatever bits it
    had before and whatever the umask leaves a new one. (Another user's file, and a file system
    without such bits, stay as they are.)"""
    descriptor = itself(path, flags, 0o600)
    with suppress(OSError):
        os.fchmod(descriptor, 0o600)
    return descriptor
