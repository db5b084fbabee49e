"""Opens a run's files for writing: never through a link, and private where needed."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_REFUSED = {
    errno.ELOOP: "it is a link, and a run does not write through links; remove it",
    errno.ENXIO: "it is not an ordinary file; remove it",
}


def no_links(path: str, flags: int, mode: int = 0o666) -> int:
    """`open(..., opener=no_links)` raises OSError (ELOOP, ENXIO) if the path is a link or a pipe.
    A file with a second name (a hard link) is first replaced by a copy."""
    # O_NONBLOCK has no effect on a regular file; without it, opening a pipe waits for a reader.
    safe = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, safe, mode)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise OSError(error.errno, _REFUSED[error.errno], str(path)) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, _REFUSED[errno.ENXIO], str(path))
    if status.st_nlink > 1:
        os.close(descriptor)
        unshare(Path(path))
        descriptor = os.open(path, safe, mode)
    if flags & os.O_TRUNC:
        os.ftruncate(descriptor, 0)
    return descriptor


def unshare(path: Path) -> None:
    """Replace a file that has a second hard link (from `cp -al`, for example) by a copy."""
    if path.stat(follow_symlinks=False).st_nlink > 1:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            os.replace(shutil.copy2(path, folder), path)


def private(path: str, flags: int) -> int:
    """`open(..., opener=private)`, for completions, replies and logs: opens like `no_links`, and
    then gives the file mode 0600, unless it belongs to another user."""
    descriptor = no_links(path, flags, 0o600)
    with suppress(OSError):
        os.fchmod(descriptor, 0o600)
    return descriptor


def private_folder(path: Path) -> None:
    """Make a folder that only this user may enter, for files that libraries write."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(OSError):
        path.chmod(0o700)
