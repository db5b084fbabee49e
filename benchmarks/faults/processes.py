"""How the runs of a campaign are started: warm, quiet, several at once and told in order."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "DS_ACCELERATOR": "cpu",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def quiet_processes() -> None:
    """Before the first is started: what they inherit, and what is imported before they fork."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.tiny_preload", "benchmarks.faults.warm"])


def map_at_once(act: Callable[[T], R], cases: Iterable[T], jobs: int) -> Iterator[R]:
    """`act` of each, in order, `jobs` at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(act, cases)
