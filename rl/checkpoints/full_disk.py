"""Retries a write until there is room for it, and logs once a minute that the run waits."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rl.console import duration, warn
from rl.files import FULL
from rl.ranks import heartbeat, signals

T = TypeVar("T")

WARN_EVERY_S = 60.0
TRY_EVERY_S = 5.0
POLL_EVERY_S = 0.2
_RUST_ERROR = re.compile(rf"\(os error ({'|'.join(map(str, FULL))})\)")
"""How safetensors, which raises no OSError, ends its message about a full disk."""


def retry_until_space(write: Callable[[], T], folder: Path, name: str) -> T:
    """Call `write` until the disk of `folder` has space for it, and return its result. Raises the
    disk's error once the process is asked to stop. Local (no collective)."""
    began_s = time.monotonic()
    next_warning_s = began_s
    while True:
        try:
            result = write()
        except Exception as error:
            if not is_full(error) or signals.stop_received():
                raise
        else:
            if next_warning_s > began_s:
                waited = duration(time.monotonic() - began_s)
                warn(f"{folder}: there is room again after {waited}, and {name} is written")
            return result
        if (now_s := time.monotonic()) >= next_warning_s:
            next_warning_s = now_s + WARN_EVERY_S
            warn(
                f"{folder} has no room: {name} waits, for {duration(now_s - began_s)} now, and is "
                "written once there is room (delete something, or raise the quota, or with prlimit "
                "--fsize the largest size of a file); SIGTERM ends the run"
            )
        while time.monotonic() < now_s + TRY_EVERY_S and not signals.stop_received():
            heartbeat.note_wait()
            time.sleep(POLL_EVERY_S)


def is_full(error: BaseException) -> bool:
    """Whether the disk or a user's share of it is full, or a file has reached its largest size,
    whichever library says so."""
    if isinstance(error, OSError):
        return error.errno in FULL
    if error.__cause__ is not None and is_full(error.__cause__):
        return True
    return _RUST_ERROR.search(str(error)) is not None
