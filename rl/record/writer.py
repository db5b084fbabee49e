"""Writes a run's files beside training: one thread per process, in order, all of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from rl.checkpoints.disk_room import when_there_is_room
from rl.console.console import warn

MAX_WAITING = 10
"""Jobs beside the one under way: two iterations' or more. They hold pictures and weights in
memory."""


class BackgroundWriter:
    """Local; every rank has its own. Belongs to the main thread."""

    def __init__(self, folder: Path, max_waiting: int = MAX_WAITING) -> None:
        self._folder = folder
        self._places = threading.Semaphore(max_waiting + 1)
        self._thread = ThreadPoolExecutor(1, "writer")
        self._last: Future[None] | None = None
        self._errors: deque[Exception] = deque()
        self._has_waited = False

    def put(self, what: str, write: Callable[[], object]) -> Future[None]:
        """Have `write` called after all that was put before; what it reads must not change any
        more. Waits while too much is waiting. Raises an earlier job's error, once; all jobs are put
        all the same. The result is done when `write` was called."""
        if not self._places.acquire(blocking=False):
            if not self._has_waited:
                self._has_waited = True
                warn(
                    f"{self._folder}: the disk is slower than training, which waits for it (said "
                    "once; a smaller tracking.images_per_iteration writes less)"
                )
            self._places.acquire()
        earlier = self._errors.popleft() if self._errors else None
        self._last = self._thread.submit(self._write, what, write)
        if earlier is not None:
            raise earlier
        return self._last

    def flush(self) -> None:
        """Wait until all is on disk. Raises what could not be written, once."""
        self.drain()
        self._raise_first()

    def drain(self) -> None:
        """Wait until all that can be is on disk; what could not is raised later."""
        if self._last is not None:
            self._last.result()

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Complete what was put. Raises what could not be written, unless another error ends the
        run."""
        self.drain()
        self._thread.shutdown()
        if error is None:
            self._raise_first()

    def _raise_first(self) -> None:
        if self._errors:
            raise self._errors.popleft()

    def _write(self, what: str, write: Callable[[], object]) -> None:
        try:
            when_there_is_room(write, self._folder, what)
        except Exception as error:
            warn(f"{what} could not be written: {str(error) or repr(error)}")
            self._errors.append(error)
        finally:
            self._places.release()
