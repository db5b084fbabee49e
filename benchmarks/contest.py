"""Workers in fresh processes, told in turn to run an iteration each.

What: `Contestant` (one worker), `interleave` (A B C, A B C, ..., the first round dropped). What
not: what a worker does, what the numbers mean. Called by `side_by_side.py`.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from benchmarks.post import Measured, Order


class Contestant:
    """One side, in a process of its own with one thread for arithmetic."""

    def __init__(self, work: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """`work(connection, *arguments, **options)` builds its side and obeys orders."""
        os.environ["OMP_NUM_THREADS"] = "1"
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(
            target=work, args=(theirs, *arguments), kwargs=options, daemon=True
        )
        self._process.start()
        theirs.close()

    def iterate(self, flops: bool = False) -> Measured:
        """One iteration. Raises RuntimeError when the worker died."""
        try:
            self._connection.send(Order(flops))
            measured: Measured = self._connection.recv()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            raise RuntimeError("a worker died; its traceback is above") from None
        return measured

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.join()


def interleave(
    sides: Mapping[str, Callable[[], Contestant]], num_rounds: int
) -> dict[str, list[Measured]]:
    """`num_rounds` iterations of every side in turn, after one each that does not count."""
    with ExitStack() as stack:
        contestants = {name: stack.enter_context(make()) for name, make in sides.items()}
        rounds = [
            {name: contestant.iterate() for name, contestant in contestants.items()}
            for _ in range(num_rounds + 1)
        ]
    return {name: [one[name] for one in rounds[1:]] for name in sides}
