"""Where the main thread is, read from any thread: `calls`."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType
from typing import NamedTuple

_one_reader = threading.Lock()


class Call(NamedTuple):
    module: str
    """'rl.run.loop', also for the module that Python runs as `__main__`."""
    code: int
    instruction: int
    """Byte offset of the instruction that it is at."""


def calls() -> list[Call]:
    """The calls of the main thread, the innermost first. No garbage is collected while another
    thread reads: Python 3.11 makes frame objects for it, a collection's finalizers would let the
    main thread run on meanwhile, and the process would crash."""
    if threading.current_thread() is threading.main_thread():
        return _calls_from(sys._getframe(1))
    with _one_reader:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return _calls_from(sys._current_frames().get(threading.main_thread().ident or 0))
        finally:
            if was_enabled:
                gc.enable()


def _calls_from(frame: FrameType | None) -> list[Call]:
    calls = []
    while frame is not None:
        spec = frame.f_globals.get("__spec__")
        module = str(spec.name if spec else frame.f_globals.get("__name__"))
        calls.append(Call(module, id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return calls
