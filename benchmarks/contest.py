"""Workers in processes of their own, told in turn to run an iteration each."""

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

from benchmarks.post import Measured, Order

SHOWN_CHARS = 3000
"""Of a dead worker's last words."""
PATIENCE_S = 900
"""How long one iteration may take, the worker's start included, on a machine busy with others."""


class Contestant:
    """One side, in a process of its own with one thread for arithmetic."""

    def __init__(self, work: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """`work(connection, *arguments, **options)` builds its side and obeys orders."""
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.ready"])
        self._connection, theirs = context.Pipe()
        self._output = Path(tempfile.mkstemp(prefix="contestant-", suffix=".log")[1])
        self._process = context.Process(
            target=_in_silence, args=(self._output, work, theirs, *arguments), kwargs=options
        )
        self._process.start()
        theirs.close()

    def order(self, flops: bool = False) -> None:
        """Have an iteration run. (Of a worker that has died, `report` tells.)"""
        with suppress(BrokenPipeError):
            self._connection.send(Order(flops))

    def report(self) -> Measured:
        """Of the iteration that was ordered. Raises RuntimeError when it died or is stuck."""
        how = f"said nothing for {PATIENCE_S} s"
        try:
            if self._connection.poll(PATIENCE_S):
                measured: Measured = self._connection.recv()
                return measured
        except (EOFError, ConnectionResetError):
            how = "died"
        output = self._output.read_text(errors="replace")[-SHOWN_CHARS:]
        raise RuntimeError(f"a worker {how}; its last words:\n{output}")

    def iterate(self, flops: bool = False) -> Measured:
        """One iteration."""
        self.order(flops)
        return self.report()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Not terminate(): a run hears that as a wish to save and leave.
        self._process.kill()
        self._process.join()
        self._connection.close()
        self._output.unlink()


def _in_silence(
    output: Path, work: Callable[..., None], connection: Connection, *arguments: Any, **options: Any
) -> None:
    """What a worker prints goes into a file, to be shown if it dies."""
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
    """`num_rounds` iterations of every side in turn, after one each that does not count; then one
    more of each under the FLOP counter, whose seconds do not count. Fewer rounds, one at least,
    once `limit_s` wall seconds have gone by."""
    ends_s = time.monotonic() + limit_s
    rounds: list[dict[str, Measured]] = []
    with ExitStack() as stack:
        contestants = {name: stack.enter_context(make()) for name, make in sides.items()}
        while len(rounds) <= 1 or (len(rounds) <= num_rounds and time.monotonic() < ends_s):
            rounds.append({name: one.iterate() for name, one in contestants.items()})
            print(f"  round {len(rounds) - 1} of {num_rounds}", file=sys.stderr, flush=True)
        counted = {}
        if count_flops:
            counted = {name: one.iterate(flops=True) for name, one in contestants.items()}
    return {name: [one[name] for one in rounds[1:]] for name in sides}, counted
