"""Whether a process uses a run's folder, by the kernel's locks; keeps others off it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from rl.checkpoints.checkpoint import SAVING

LOCKS = (".lock", SAVING)
Use = Literal["running", "idle", "unknown"]
"""unknown: the file system has no locks, or the file may not be read."""


def use_of(run_dir: Path) -> Use:
    """Whether a run, or a rank of one that saves, is in that folder. Makes no file."""
    with ExitStack() as stack:
        return _take(run_dir, os.O_RDONLY, fcntl.LOCK_SH, stack)


@contextmanager
def to_oneself(run_dir: Path) -> Iterator[Use]:
    """Inside, where it yields 'idle', no run can begin in that folder."""
    with ExitStack() as stack:
        yield _take(run_dir, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX, stack)


def _take(run_dir: Path, flags: int, kind: int, stack: ExitStack) -> Use:
    for name in LOCKS:
        try:
            descriptor = os.open(run_dir / name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        except OSError:
            return "unknown"
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return "running"
        except OSError:
            return "unknown"
    return "idle"
