"""Retries a write until the disk has space, and logs each minute what is missing where."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rl.files.atomic import FULL
from rl.ranks import heartbeat, signals
from rl.record.console import duration, warn

T = TypeVar("T")

SAY_EVERY_S = 60.0
TRY_EVERY_S = 5.0
LISTEN_EVERY_S = 0.2
_RUST = re.compile(rf"\(os error ({'|'.join(map(str, FULL))})\)")
"""How safetensors, which raises no OSError, ends what it says of a full disk."""


def when_there_is_room(
    write: Callable[[], T], folder: Path, what: str, num_bytes: int | None = None
) -> T:
    """What `write` returns, once the disk takes what it writes; it is called again from its
    beginning. `folder`: where; `num_bytes`: about how much, None: as the error says.

    Asked to stop, it waits no longer, and raises what the disk said. Local.
    """
    began_s: float | None = None
    said_s = 0.0
    while True:
        try:
            written = write()
        except Exception as error:
            if not is_full(error) or signals.stop_heard():
                raise
            now_s = time.monotonic()
            if began_s is None:
                began_s = now_s
            if not said_s or now_s - said_s >= SAY_EVERY_S:
                said_s = now_s
                _say(folder, what, num_bytes or getattr(error, "num_bytes", None), now_s - began_s)
        else:
            if began_s is not None:
                waited = duration(time.monotonic() - began_s)
                warn(f"{folder}: there is room again after {waited}, and {what} is written")
            return written
        _wait()


def is_full(error: BaseException) -> bool:
    """Whether that is a full disk, or a user's share of one, whichever library says so."""
    if isinstance(error, OSError):
        return error.errno in FULL
    if error.__cause__ is not None and is_full(error.__cause__):
        return True
    return _RUST.search(str(error)) is not None


def _say(folder: Path, what: str, num_bytes: int | None, waited_s: float) -> None:
    wants = f"{what} wants {_size(num_bytes)}" if num_bytes else f"{what} wants room"
    free = "what is free is unknown"
    with suppress(OSError):
        free = f"{_size(shutil.disk_usage(_there(folder)).free)} are free"
    since = f", for {duration(waited_s)} now" if waited_s >= 1 else ""
    warn(
        f"the disk of {folder} is full: {wants}, {free}. The run waits{since}, and goes on by "
        "itself once there is room (delete something, or raise the quota); SIGTERM ends it"
    )


def _there(folder: Path) -> Path:
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def _wait() -> None:
    """Until the next try, or until this rank is asked to stop."""
    end_s = time.monotonic() + TRY_EVERY_S
    while time.monotonic() < end_s and not signals.stop_heard():
        heartbeat.note_wait()
        time.sleep(LISTEN_EVERY_S)
