"""Checks that a path is a regular file before it is opened: opening a pipe could block."""

from __future__ import annotations

import os
import stat
from pathlib import Path

GONE = "does not exist"
FOLDER = "is a folder, not a file"


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
    return "" if stat.S_ISREG(mode) else "is a device or a pipe, not a file"


def is_folder(path: str | Path) -> bool:
    """`Path.is_dir`, without its OSError for a name that is too long."""
    return not_a_file(path) == FOLDER


def read_text(path: str | Path, max_bytes: int) -> str:
    """The text of a UTF-8 file.

    Raises ValueError if it is not a regular file, cannot be read, is longer than `max_bytes` or is
    not UTF-8; the message is worded to follow the file's name.
    """
    if why := not_a_file(path):
        raise ValueError(why)
    try:
        with open(path, "rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    if len(content) > max_bytes:
        raise ValueError(f"is longer than {max_bytes} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 ({error.reason} at byte {error.start})") from error
