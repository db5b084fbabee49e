"""Starts worker processes, and runs their iterations in turn."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from benchmarks.link import Measured

SHOWN_CHARS = 3000
"""Number of last characters of a dead worker's output that an error message has."""
PATIENCE_S = 900
"""Time limit of an iteration and the worker's start, generous for a busy machine."""


class Contestant:
    """A worker process that trains one of the compared setups, with one thread for arithmetic."""

    def __init__(self, work: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """`work(connection, *arguments, **options)` runs an iteration for each order."""
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.worker_imports"])
        self._connection, worker_end = context.Pipe()
        self._output = Path(tempfile.mkstemp(prefix="contestant-", suffix=".log")[1])
        self._process = context.Process(
            target=_work_quietly, args=(self._output, work, worker_end, *arguments), kwargs=options
        )
        self._process.start()
        worker_end.close()

    def iterate(self, flops: bool = False) -> Measured:
        """Runs an iteration and returns its measurements. RuntimeError if the worker died or
        hangs."""
        failure = f"sent nothing for {PATIENCE_S} s"
        try:
            self._connection.send(flops)
            if self._connection.poll(PATIENCE_S):
                measured: Measured = self._connection.recv()
                return measured
        except (EOFError, ConnectionError):
            failure = "died"
        output = self._output.read_text(errors="replace")[-SHOWN_CHARS:]
        raise RuntimeError(f"a worker {failure}; its last output:\n{output}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # `terminate` would make a run save before it exits.
        self._process.kill()
        self._process.join()
        self._connection.close()
        self._output.unlink()


def _work_quietly(
    output: Path, work: Callable[..., None], connection: Connection, *arguments: Any, **options: Any
) -> None:
    """Calls `work` with the process's output in a file, whose end `iterate` shows in an error."""
    with output.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
        work(connection, *arguments, **options)


def interleave(
    setups: Mapping[str, Callable[[], Contestant]], num_rounds: int, count_flops: bool = False
) -> tuple[dict[str, list[Measured]], dict[str, Measured]]:
    """Runs rounds of an iteration of every setup; returns the measurements of each but the first
    round, and those of a last one with the FLOP counter."""
    rounds: list[dict[str, Measured]] = []
    with ExitStack() as stack:
        contestants = {name: stack.enter_context(make()) for name, make in setups.items()}
        for number in range(num_rounds + 1):
            rounds.append({name: each.iterate() for name, each in contestants.items()})
            print(f"  round {number} of {num_rounds}", file=sys.stderr, flush=True)
        counted = {}
        if count_flops:
            counted = {name: each.iterate(flops=True) for name, each in contestants.items()}
    return {name: [measured[name] for measured in rounds[1:]] for name in setups}, counted
