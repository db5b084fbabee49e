"""Another thread reads the main thread's call stack."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl.ranks import heartbeat


def read_elsewhere(depth: int) -> list[heartbeat.Call]:
    """The calls of this thread, `depth` calls deeper, read by another thread."""
    if depth:
        return read_elsewhere(depth - 1)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(heartbeat.calls).result()


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """The thread of each garbage collection; every new object starts one."""
    threads: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        threads.append(threading.current_thread().name)

    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    yield threads
    gc.set_threshold(*before)
    gc.callbacks.remove(note)


def test_all_calls_are_read_innermost_first() -> None:
    calls = read_elsewhere(30)
    ours = [call for call in calls if call.code == id(read_elsewhere.__code__)]
    assert len(ours) == 31 and {call.module for call in ours} == {__name__}
    assert calls.index(ours[0]) > 0, "the innermost calls wait for the other thread"
    assert ours[0].instruction != ours[1].instruction


def test_no_garbage_is_collected_while_another_thread_reads(collections: list[str]) -> None:
    """In Python 3.11.7 such a collection ended the process with SIGSEGV, within seconds if the main
    thread created many generators."""
    read_elsewhere(200)
    assert gc.isenabled()
    assert "MainThread" in collections, "the threshold has an effect"
    while_reading = [name for name in collections if name.startswith("ThreadPoolExecutor")]
    assert len(while_reading) < 50, "it would be one per call"
