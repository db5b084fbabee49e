"""A worker thread that handles waiting items in batches."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class BatchWorker(Generic[Item, Result]):
    """A daemon: it never keeps a dying process alive."""

    def __init__(
        self,
        work: Callable[[Sequence[Item]], Sequence[Result]],
        max_batch_size: int,
        max_wait_s: float,
        name: str,
    ) -> None:
        """`work`: at most `max_batch_size` items to as many results, in order. `max_wait_s`: how
        long a first item waits for company, s."""
        self._work = work
        self._max_batch_size = max_batch_size
        self._max_wait_s = max_wait_s
        self._waiting: queue.SimpleQueue[tuple[Item, Future[Result]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, item: Item) -> Future[Result]:
        """The item's result, or the exception of its batch."""
        future: Future[Result] = Future()
        self._waiting.put((item, future))
        return future

    def _run(self) -> None:
        while True:
            waiting = self._gather()
            # False: nobody waits for that result any more.
            batch = [pair for pair in waiting if pair[1].set_running_or_notify_cancel()]
            if batch:
                self._do(batch)

    def _gather(self) -> list[tuple[Item, Future[Result]]]:
        batch = [self._waiting.get()]
        deadline = time.monotonic() + self._max_wait_s
        while len(batch) < self._max_batch_size:
            try:
                batch.append(self._waiting.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                break
        return batch

    def _do(self, batch: Sequence[tuple[Item, Future[Result]]]) -> None:
        try:
            results = self._work([item for item, _ in batch])
            answered = list(zip(batch, results, strict=True))
        except BaseException as error:
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), result in answered:
            future.set_result(result)
