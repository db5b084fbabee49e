"""Finds where the main thread is, and prints it while a run loads."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

EVERY_S = 4.0
SAME_S = 30.0
"""A place that was printed is not printed again before this has passed."""
_stopped = threading.Event()
_stopped.set()
_progress = ""
_read_lock = threading.Lock()


class Call(NamedTuple):
    module: str
    """'rl.run.loop', also for the module that Python runs as `__main__`."""
    code: int
    instruction: int
    """Byte offset of the current instruction."""


def start(first_s: float | None = None) -> None:
    """Start printing, the first line after `first_s`; does nothing if it is printing already."""
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
    """Set the progress text that the next lines show; '' removes it."""
    global _progress
    _progress = progress


def _print_lines(first_s: float, stopped: threading.Event) -> None:
    began_s, wait_s, printed, printed_s = time.monotonic(), first_s, "", 0.0
    while not stopped.wait(wait_s):
        status = ": ".join(filter(None, (described(calls()), _progress)))
        now_s, wait_s = time.monotonic() - began_s, EVERY_S
        if status != printed or now_s - printed_s >= SAME_S:
            printed, printed_s = status, now_s
            print(f"[{now_s:3.0f} s] loading: {status}", flush=True)


def described(calls: Sequence[Call]) -> str:
    """'rl.engines.vllm.vllm, in torch': the innermost `rl` module among `calls` (innermost first),
    and the package that it called."""
    package = ""
    for call in calls:
        top = call.module.split(".")[0]
        if top == "rl":
            return f"{call.module}, in {package}" if package else call.module
        if top not in sys.stdlib_module_names and top not in ("__main__", "None"):
            package = top
    return f"Python, in {package}" if package else "Python"


def calls() -> list[Call]:
    """The main thread's call stack, innermost first; callable from any thread. Another thread reads
    it with garbage collection off: the read creates frame objects (Python 3.11), and a collection
    could run finalizers that let the main thread run on, which would crash the process."""
    if threading.current_thread() is threading.main_thread():
        return _calls_from(sys._getframe(1))
    with _read_lock:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return _calls_from(sys._current_frames().get(threading.main_thread().ident or 0))
        finally:
            if was_enabled:
                gc.enable()


def _calls_from(frame: FrameType | None) -> list[Call]:
    stack = []
    while frame is not None:
        spec = frame.f_globals.get("__spec__")
        module = str(spec.name if spec else frame.f_globals.get("__name__"))
        stack.append(Call(module, id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return stack
