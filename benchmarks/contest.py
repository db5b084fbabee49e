"""Runs iterations of several worker processes in turn."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from benchmarks.link import Measured, Order

SHOWN_CHARS = 3000
"""The last characters of a dead worker's output that an error shows."""
PATIENCE_S = 900
"""Time limit of an iteration, the worker's start included, on a busy machine."""


class Contestant:
    """One side of a comparison, in a separate process with one thread for arithmetic."""

    def __init__(self, work: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """`work(connection, *arguments, **options)` builds its side and runs ordered iterations."""
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

    def order(self, flops: bool = False) -> None:
        """Orders an iteration. (If the worker has died, `report` raises.)"""
        with suppress(BrokenPipeError):
            self._connection.send(Order(flops))

    def report(self) -> Measured:
        """Returns the measurements of the order; RuntimeError if the worker died or hangs."""
        failure = f"sent nothing for {PATIENCE_S} s"
        try:
            if self._connection.poll(PATIENCE_S):
                measured: Measured = self._connection.recv()
                return measured
        except (EOFError, ConnectionResetError):
            failure = "died"
        output = self._output.read_text(errors="replace")[-SHOWN_CHARS:]
        raise RuntimeError(f"a worker {failure}; its last output:\n{output}")

    def iterate(self, flops: bool = False) -> Measured:
        """Orders an iteration and returns its measurements."""
        self.order(flops)
        return self.report()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Not terminate(): a run would save before it exits.
        self._process.kill()
        self._process.join()
        self._connection.close()
        self._output.unlink()


def _work_quietly(
    output: Path, work: Callable[..., None], connection: Connection, *arguments: Any, **options: Any
) -> None:
    """Redirects a worker's output to a file, which an error shows if the worker dies."""
    with output.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
        work(connection, *arguments, **options)


def interleave(
    sides: Mapping[str, Callable[[], Contestant]],
    num_rounds: int,
    count_flops: bool = False,
    limit_s: float = math.inf,
) -> tuple[dict[str, list[Measured]], dict[str, Measured]]:
    """Runs `num_rounds` iterations of every side in turn, after one each that is not counted; then
    one more of each with the FLOP counter, whose seconds are not counted. After `limit_s` wall
    seconds no round begins, but at least one is run."""
    ends_s = time.monotonic() + limit_s
    rounds: list[dict[str, Measured]] = []
    with ExitStack() as stack:
        contestants = {name: stack.enter_context(make()) for name, make in sides.items()}
        while len(rounds) <= 1 or (len(rounds) <= num_rounds and time.monotonic() < ends_s):
            rounds.append({name: each.iterate() for name, each in contestants.items()})
            print(f"  round {len(rounds) - 1} of {num_rounds}", file=sys.stderr, flush=True)
        counted = {}
        if count_flops:
            counted = {name: each.iterate(flops=True) for name, each in contestants.items()}
    return {name: [measured[name] for measured in rounds[1:]] for name in sides}, counted
