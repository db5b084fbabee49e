"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], seconds: float = 300.0) -> None:
    """Until it holds; fails after what is long even on a busy machine."""
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)
