"""Waits for another process or thread."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], seconds: float = 300.0) -> None:
    """Waits until the condition holds; fails after `seconds`, which suffice on a busy machine."""
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, f"the condition did not hold in {seconds} s"
        time.sleep(0.02)
