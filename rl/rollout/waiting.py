"""The main thread's wait for verdicts: left soon after somebody asks to stop, and told of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from rl.console.progress import Progress
from rl.rollout.consensus import Interrupted

T = TypeVar("T")

LISTEN_EVERY_S = 0.5


class Waiting:
    """For the verdicts of one rollout."""

    def __init__(self, futures: Sequence[Future[Any]], should_stop: Callable[[], bool]) -> None:
        """`futures`: all that are awaited, to say how far it is."""
        self._futures = futures
        self._should_stop = should_stop
        self._progress = Progress("verdicts", len(futures), self._num_in())

    def result(self, future: Future[T]) -> T:
        """Of `future`, once it is there. Raises `Interrupted` soon after `should_stop()`."""
        while not self._should_stop():
            if wait([future], timeout=LISTEN_EVERY_S).done:
                return future.result()
            self._progress.at(self._num_in())
        raise Interrupted

    def end(self) -> None:
        """No more are awaited."""
        self._progress.end()

    def _num_in(self) -> int:
        return sum(future.done() for future in self._futures)
