"""Whether a process uses a run's folder, by the kernel's locks."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from rl.checkpoints.checkpoint import SAVING

LOCKS = (".lock", SAVING)
Use = Literal["running", "idle", "unknown"]
"""unknown: the file system has no locks, or the file may not be read."""


def use_of(run_dir: Path) -> Use:
    """Whether a run, or a rank of one that saves, is in that folder. Makes no file."""
    with ExitStack() as stack:
        for name in LOCKS:
            try:
                descriptor = os.open(run_dir / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except FileNotFoundError:
                continue
            except BlockingIOError:
                return "running"
            except OSError:
                return "unknown"
    return "idle"
