"""The event loop in a thread: results, errors, and a close that leaves no thread or task."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress

import pytest

from rl.judge import http
from rl.judge.http import BackgroundLoop, StoppedError


def test_results_and_errors_reach_the_caller() -> None:
    async def work(reply: int) -> tuple[int, str]:
        await asyncio.sleep(0.01)
        return reply, threading.current_thread().name

    async def fail() -> None:
        raise LookupError("here")

    with BackgroundLoop("judge") as loop:
        futures = [loop.submit(work(n)) for n in range(3)]
        assert [future.result(5) for future in futures] == [(n, "judge") for n in range(3)]
        with pytest.raises(LookupError, match="here"):
            loop.submit(fail()).result(5)


async def endless(started: threading.Event, cancelled: threading.Event) -> None:
    try:
        started.set()
        await asyncio.sleep(600)
    finally:
        cancelled.set()


def test_a_wait_ends_at_a_request_to_stop_and_cancels_its_coroutine() -> None:
    cancelled, stop = threading.Event(), threading.Event()
    with BackgroundLoop() as loop:
        assert loop.run(asyncio.sleep(0, 7), lambda: False) == 7
        with pytest.raises(StoppedError):
            loop.run(endless(stop, cancelled), stop.is_set)
        assert cancelled.wait(60)


def test_close_cancels_running_tasks_and_lets_them_clean_up() -> None:
    started, cleaned_up = threading.Event(), threading.Event()
    loop = BackgroundLoop("short-lived")
    future = loop.submit(endless(started, cleaned_up))
    assert started.wait(5)
    for _ in range(2):
        loop.close()
    assert cleaned_up.is_set()
    with pytest.raises(CancelledError):
        future.result(5)
    assert "short-lived" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="closed"):
        loop.submit(asyncio.sleep(0))


def test_close_does_not_wait_for_ever_for_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stubborn() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        time.sleep(1.0)

    monkeypatch.setattr(http, "JOIN_TIMEOUT_S", 0.1)
    with BackgroundLoop("stubborn") as loop:
        loop.submit(stubborn())
        time.sleep(0.1)
        closed_s = time.monotonic()
    assert time.monotonic() - closed_s < 0.9
