"""Reads regular files only, and of limited size: a pipe could block, a device may never end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

GONE = "does not exist"
FOLDER = "is a folder, not a file"
NO_FILE = "is a device or a pipe, not a file"
MAX_BYTES = 64 * 10**6
"""Of one JSON object; a run's own have a few kB."""


def not_a_file(path: str | Path) -> str:
    """Why `path` is not a regular file, worded to follow its name in a message; '' if it is."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return GONE
    except OSError as error:
        return f"cannot be reached ({error.strerror})"
    except ValueError:  # a NUL or a lone surrogate
        return "is not a name that a file can have"
    if stat.S_ISDIR(mode):
        return FOLDER
    return "" if stat.S_ISREG(mode) else NO_FILE


def is_folder(path: str | Path) -> bool:
    """`Path.is_dir`, without its OSError for a name that is too long."""
    return not_a_file(path) == FOLDER


def read_bytes(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file. Raises an OSError, which names the file, for anything else and
    for more than `max_bytes`."""
    # O_NONBLOCK: opening a pipe waits for a writer otherwise; for a file it has no effect.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"{NO_FILE}; remove it", str(path))
        if status.st_size > max_bytes:
            raise OSError(errno.EINVAL, f"is longer than {max_bytes} bytes", str(path))
        return file.read(max_bytes)


def read_text(path: str | Path, max_bytes: int) -> str:
    """The text of a UTF-8 file.

    Raises ValueError if it is not a regular file, cannot be read, is longer than `max_bytes` or is
    not UTF-8; the message is worded to follow the file's name.
    """
    if why := not_a_file(path):
        raise ValueError(why)
    try:
        return read_bytes(path, max_bytes).decode("utf-8")
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 ({error.reason} at byte {error.start})") from error
