"""How a file of ours is opened to be written: itself, never what a link leads to; and for this user
alone (0600) where it holds what outsiders said, or logs, which may repeat it."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

_REFUSED = {
    errno.ELOOP: "it is a link, and what is written here goes to no other place; remove it",
    errno.ENXIO: "it is no ordinary file; remove it",
}


def itself(path: str, flags: int, mode: int = 0o666) -> int:
    """`open(..., opener=itself)`: a folder that came from elsewhere may hold links in the place of
    what is written there, or pipes, which nobody reads. Raises OSError for either (ELOOP, ENXIO).
    """
    try:
        # A regular file takes no notice of O_NONBLOCK; a pipe's writer would wait for a reader.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise OSError(error.errno, _REFUSED[error.errno], str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, _REFUSED[errno.ENXIO], str(path))
    return descriptor


def private(path: str, flags: int) -> int:
    """`open(..., opener=private)`: as `itself`, and nobody else reads the file, whatever bits it
    had before and whatever the umask leaves a new one. (Another user's file, and a file system
    without such bits, stay as they are.)"""
    descriptor = itself(path, flags, 0o600)
    with suppress(OSError):
        os.fchmod(descriptor, 0o600)
    return descriptor
