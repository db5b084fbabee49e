"""Waits for another process or thread."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def wait_for(condition: Callable[[], object], seconds: float = 300.0) -> None:
    """Waits until the condition holds; fails after `seconds`, which suffice on a busy machine."""
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, f"the condition did not hold in {seconds} s"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Whether the process has ended, also if its parent has not read its exit code."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
