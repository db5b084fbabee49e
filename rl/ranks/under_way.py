"""Prints every few seconds while a run loads which module is at work, and in whose package."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

from rl.ranks import main_thread
from rl.ranks.main_thread import Call

EVERY_S = 4.0
_stopped = threading.Event()
_stopped.set()
_progress = ""


def start(first_s: float | None = None) -> None:
    """Print from now on, the first line after `first_s`; does nothing when it prints already."""
    global _stopped
    if _stopped.is_set():
        _stopped = threading.Event()
        args = (EVERY_S if first_s is None else first_s, _stopped)
        threading.Thread(target=_print_lines, args=args, name="loading", daemon=True).start()


def stop() -> None:
    _stopped.set()


def is_printing() -> bool:
    return not _stopped.is_set()


def note(progress: str) -> None:
    """How far the loading is, for the lines to come; '' when it is done."""
    global _progress
    _progress = progress


def _print_lines(first_s: float, stopped: threading.Event) -> None:
    began_s, wait_s = time.monotonic(), first_s
    while not stopped.wait(wait_s):
        what = ": ".join(filter(None, (under_way(main_thread.calls()), _progress)))
        print(f"[{time.monotonic() - began_s:3.0f} s] loading: {what}", flush=True)
        wait_s = EVERY_S


def under_way(calls: Sequence[Call]) -> str:
    """'rl.engines.vllm.vllm, in torch': the innermost module of ours among `calls`, innermost
    first, and the package that it called."""
    package = ""
    for call in calls:
        top = call.module.split(".")[0]
        if top == "rl":
            return f"{call.module}, in {package}" if package else call.module
        if top not in sys.stdlib_module_names and top not in ("__main__", "None"):
            package = top
    return f"Python, in {package}" if package else "Python"
