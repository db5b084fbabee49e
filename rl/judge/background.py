"""Runs asyncio coroutines in a daemon thread, so that judging goes on while the caller renders."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Self, TypeVar

T = TypeVar("T")

JOIN_TIMEOUT_S = 10.0
POLL_S = 0.5


class StoppedError(Exception):
    """The process was asked to stop before the coroutine ended."""


class BackgroundLoop:
    """Runs coroutines until `close()`. Use one per process: an httpx pool works in one loop."""

    def __init__(self, name: str = "background-loop") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `coro` in the loop; its result, exception or cancellation arrives in the future.

        Raises RuntimeError after `close()`.
        """
        if self._loop.is_closed():
            coro.close()
            raise RuntimeError("this BackgroundLoop is closed: submit before close()")
        return asyncio.run_coroutine_threadsafe(coro, self._loop)

    def run(self, coro: Coroutine[Any, Any, T], should_stop: Callable[[], bool]) -> T:
        """The result of `coro`. Raises StoppedError, and cancels it, once `should_stop()` holds."""
        future = self.submit(coro)
        while not wait([future], timeout=POLL_S).done:
            if should_stop():
                future.cancel()
                raise StoppedError
        return future.result()

    def close(self) -> None:
        """Cancel all coroutines, wait at most `JOIN_TIMEOUT_S` for them, and stop the thread. Does
        nothing a second time."""
        if self._loop.is_closed():
            return
        with suppress(TimeoutError):  # a coroutine that ignores its cancellation
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(JOIN_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_TIMEOUT_S)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()  # a thread may hang; close() has a timeout
