"""Retries a write until the disk has space, and logs each minute what is missing where."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.filesize import decimal

from rl.console.console import duration, warn
from rl.files.atomic import FULL
from rl.ranks import heartbeat, signals

T = TypeVar("T")

SAY_EVERY_S = 60.0
TRY_EVERY_S = 5.0
LISTEN_EVERY_S = 0.2
_RUST = re.compile(rf"\(os error ({'|'.join(map(str, FULL))})\)")
"""How safetensors, which raises no OSError, ends its message about a full disk."""


def when_there_is_room(
    write: Callable[[], T], folder: Path, what: str, num_bytes: int | None = None
) -> T:
    """What `write` returns, called again until the disk has room, or the process is asked to stop:
    then raises the disk's error. `folder`: where it writes; `num_bytes`: about how much. Local."""
    began_s = warned_s = 0.0
    while True:
        try:
            written = write()
        except Exception as error:
            if not is_full(error) or signals.stop_heard():
                raise
            now_s = time.monotonic()
            began_s = began_s or now_s
            if not warned_s or now_s - warned_s >= SAY_EVERY_S:
                warned_s = now_s
                num_bytes = num_bytes or getattr(error, "num_bytes", None)
                wants = f"{what} wants {decimal(num_bytes) if num_bytes else 'room'}"
                since = f", for {duration(now_s - began_s)} now" if now_s - began_s >= 1 else ""
                warn(
                    f"the disk of {folder} is full: {wants}, {_free(folder)}. The run "
                    f"waits{since}, and goes on by itself once there is room (delete something, or "
                    "raise the quota); SIGTERM ends it"
                )
        else:
            if began_s:
                waited = duration(time.monotonic() - began_s)
                warn(f"{folder}: there is room again after {waited}, and {what} is written")
            return written
        try_again_s = time.monotonic() + TRY_EVERY_S
        while time.monotonic() < try_again_s and not signals.stop_heard():
            heartbeat.note_wait()
            time.sleep(LISTEN_EVERY_S)


def is_full(error: BaseException) -> bool:
    """Whether the disk, or a user's share of it, is full, whichever library says so."""
    if isinstance(error, OSError):
        return error.errno in FULL
    if error.__cause__ is not None and is_full(error.__cause__):
        return True
    return _RUST.search(str(error)) is not None


def _free(folder: Path) -> str:
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        return f"{decimal(shutil.disk_usage(there).free)} are free"
    except OSError:
        return "what is free is unknown"
