"""Starts a campaign's runs: several at once, forked with all imports, with few log lines."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "DS_ACCELERATOR": "cpu",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def quiet_processes() -> None:
    """Sets the environment variables and the preloaded imports of processes that start later."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.tiny_preload", "benchmarks.faults.run_imports"])


def map_at_once(act: Callable[[Any], Any], cases: Iterable[Any], jobs: int) -> Iterator[Any]:
    """Yields `act(case)` in order, computed `jobs` at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(act, cases)
