"""Writes a run's files in the background: one thread per process writes them all in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from rl.checkpoints.full_disk import retry_until_space
from rl.console import warn

MAX_WAITING = 10
"""Maximum number of queued jobs, which hold pictures and weights: enough for two iterations."""


class BackgroundWriter:
    """Each rank has its own; only the main thread may use it."""

    def __init__(self, folder: Path, max_waiting: int = MAX_WAITING) -> None:
        self._folder = folder
        self._slots = threading.Semaphore(max_waiting + 1)
        self._thread = ThreadPoolExecutor(1, "writer")
        self._last: Future[None] | None = None
        self._errors: deque[BaseException] = deque()
        self._has_waited = False

    def put(self, label: str, write: Callable[[], object]) -> Future[None]:
        """Queue `write` behind all earlier jobs; the data it reads must not change any more. Blocks
        while the queue is full. Raises an earlier job's error, once; `write` is queued even then.
        The returned future is done once `write` has run."""
        if not self._slots.acquire(blocking=False):
            if not self._has_waited:
                self._has_waited = True
                warn(
                    f"{self._folder}: the disk is slower than training, which waits for it (logged "
                    "once; a smaller tracking.images_per_iteration writes less)"
                )
            self._slots.acquire()
        earlier = self._errors.popleft() if self._errors else None
        self._last = self._thread.submit(self._write, label, write)
        if earlier is not None:
            raise earlier
        return self._last

    def flush(self) -> None:
        """Wait until all jobs have run. Raises the error of a failed job, once."""
        self.drain()
        self._raise_first()

    def drain(self) -> None:
        """Wait until all jobs have run; their errors are raised later."""
        if self._last is not None:
            self._last.result()

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Finish all queued jobs. Raises the error of a failed job, unless another error ends the
        run."""
        self.drain()
        self._thread.shutdown()
        if error is None:
            self._raise_first()

    def _raise_first(self) -> None:
        if self._errors:
            raise self._errors.popleft()

    def _write(self, label: str, write: Callable[[], object]) -> None:
        try:
            retry_until_space(write, self._folder, label)
        except BaseException as error:  # a real KeyboardInterrupt reaches only the main thread
            warn(f"{label} could not be written: {str(error) or repr(error)}")
            self._errors.append(error)
        finally:
            self._slots.release()
