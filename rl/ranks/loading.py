"""Prints every few seconds while a run loads which module is at work, and in whose package."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from itertools import takewhile

from rl.ranks import main_thread
from rl.ranks.main_thread import Call

EVERY_S = 4.0
_stopped = threading.Event()
_stopped.set()
_far = ""


def start(first_s: float | None = None) -> None:
    """From now on, the first line after `first_s`; nothing when lines are printed already."""
    global _stopped
    if _stopped.is_set():
        _stopped = threading.Event()
        args = (EVERY_S if first_s is None else first_s, _stopped)
        threading.Thread(target=_print_lines, args=args, name="loading", daemon=True).start()


def stop() -> None:
    _stopped.set()


def is_told() -> bool:
    """Whether lines are being printed."""
    return not _stopped.is_set()


def note(far: str) -> None:
    """How far that is which loads, for the lines to come; '' when it is done."""
    global _far
    _far = far


def _print_lines(first_s: float, stopped: threading.Event) -> None:
    began, wait_s = time.monotonic(), first_s
    while not stopped.wait(wait_s):
        what = under_way(main_thread.calls())
        far = f": {_far}" if _far else ""
        print(f"[{time.monotonic() - began:3.0f} s] loading: {what}{far}", flush=True)
        wait_s = EVERY_S


def under_way(calls: Sequence[Call]) -> str:
    """'rl.engines.vllm.plug, in torch': the innermost module of ours among `calls`, innermost
    first, and the package that it called."""
    modules = [call.module for call in calls]
    is_ours = [name.split(".")[0] == "rl" for name in modules]
    ours = modules[is_ours.index(True)] if True in is_ours else "Python"
    called = list(takewhile(lambda name: name.split(".")[0] != "rl", modules))
    packages = [name.split(".")[0] for name in called if name.split(".")[0] not in _STANDARD]
    return f"{ours}, in {packages[-1]}" if packages else ours


_STANDARD = {*sys.stdlib_module_names, "__main__", "None"}
