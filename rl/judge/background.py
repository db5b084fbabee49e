"""Runs asyncio coroutines in a daemon thread, so that judging goes on while this thread renders."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Self, TypeVar

T = TypeVar("T")

JOIN_TIMEOUT_S = 10.0


class BackgroundLoop:
    """Runs coroutines until `close()`. An httpx pool belongs to one loop: one per process."""

    def __init__(self, name: str = "background-loop") -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
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

    def close(self) -> None:
        """Stop the thread, cancel what still runs and wait for its end. Twice is harmless."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_TIMEOUT_S)
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
