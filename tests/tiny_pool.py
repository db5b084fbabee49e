"""A render pool whose workers are objects of this process, with a clock that tests move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from rl.api.types import RenderJob, Sample
from rl.config.schema import RenderPoolConfig
from rl.pool import pool_worker
from rl.pool.dispatch import Dispatcher, Reference, WorkerLostError

FACTS = {"torch": "2", "weights": "a"}


@dataclass
class FakeWorker:
    """Draws a picture of the job's seed; each answer takes `seconds` of the clock."""

    facts: dict[str, str] = field(default_factory=lambda: dict(FACTS))
    seconds: float = 1.0
    shift: int = 0
    """Added to every pixel: other weights."""
    fits: int = 1000
    """Pictures of a batch that fit in memory."""
    error: str = ""
    incarnation: int = 0
    dies: Callable[[int, list[int]], bool] = lambda number, seeds: False
    """Whether the worker dies of its n-th batch (from 0), which has these seeds."""
    hangs: bool = False
    num_drawn: int = 0
    batches: list[list[int]] = field(default_factory=list)

    def hello(self) -> dict[str, Any]:
        return {
            "incarnation": str(self.incarnation),
            "facts": self.facts,
            "error": self.error,
            "state_dim": 8,
        }

    def draw(self, message: pool_worker.Message) -> dict[str, Any]:
        self.num_drawn += 1
        jobs = pool_worker.unpacked_jobs(message)
        seeds = [job.noise_seed for job in jobs]
        if self.dies(self.num_drawn - 1, seeds):
            self.incarnation += 1
            raise WorkerLostError("killed")
        self.batches.append(seeds)
        answer = {"incarnation": str(self.incarnation), "seconds": self.seconds, "metrics": {}}
        if len(jobs) > self.fits:
            return {**answer, "outcomes": [("out_of_memory: full", "renderer")] * len(jobs)}
        return {**answer, "outcomes": [picture(job.noise_seed + self.shift) for job in jobs]}

    def check(self, message: pool_worker.Message, digests: list[str]) -> dict[str, Any]:
        drawn = self.draw(message)
        return {**drawn, "digests": pool_worker.digests_of(drawn["outcomes"])}

    def prepare(self, message: pool_worker.Message, method: str) -> dict[str, Any]:
        if self.dies(self.num_drawn, []):
            raise WorkerLostError("killed")
        return {"incarnation": str(self.incarnation), "outcomes": message}

    def draw_here(self, jobs: Sequence[RenderJob]) -> list[Any]:
        return [
            *map(pool_worker.unpacked_outcome, self.draw(pool_worker.packed_jobs(jobs))["outcomes"])
        ]

    def status(self) -> float:
        return 1e9 if self.hangs else 0.0


def picture(seed: int) -> np.ndarray:
    return np.full((2, 2, 3), seed % 256, np.uint8)


class FakeWorkers:
    """`dispatch.Workers` in one process. Time passes only in `wait`."""

    def __init__(self, **workers: FakeWorker) -> None:
        self.workers = workers
        self.now_s = 0.0
        self.references: list[Reference] = []
        self._calls: dict[int, tuple[float, str, str, tuple[Any, ...]]] = {}
        self._free_s = dict.fromkeys(workers, 0.0)

    def names(self) -> list[str]:
        return list(self.workers)

    def call(self, worker: str, method: str, *arguments: Any) -> int:
        number = len(self._calls)
        due_s = self.now_s
        if method in ("draw", "check"):  # one at a time
            due_s = max(due_s, self._free_s.get(worker, 0.0)) + self.workers[worker].seconds
            due_s = 1e18 if self.workers[worker].hangs else due_s
            self._free_s[worker] = due_s
        self._calls[number] = (due_s, worker, method, arguments)
        return number

    def put(self, message: pool_worker.Message) -> pool_worker.Message:
        return message

    def wait(self, calls: Sequence[int], timeout_s: float) -> list[int]:
        first_s = min((self._calls[call][0] for call in calls), default=1e18)
        self.now_s = max(self.now_s, min(first_s, self.now_s + timeout_s))
        return [call for call in calls if self._calls[call][0] <= self.now_s]

    def result(self, call: int) -> Any:
        due_s, worker, method, arguments = self._calls[call]
        if due_s == -1.0:
            raise WorkerLostError("restarted")
        return getattr(self.workers[worker], method)(*arguments)

    def restart(self, worker: str) -> None:
        made = self.workers[worker]
        made.hangs, made.incarnation, self._free_s[worker] = False, made.incarnation + 1, self.now_s
        for call, (due_s, name, method, arguments) in self._calls.items():
            if name == worker and method in ("draw", "check") and due_s > self.now_s:
                self._calls[call] = (-1.0, name, method, arguments)

    def agree(self, reference: Reference | None) -> Reference | None:
        self.references += [] if reference is None else [reference]
        return self.references[0] if self.references else None


def dispatcher_of(workers: FakeWorkers, batch_size: int = 4, **config: Any) -> Dispatcher:
    return Dispatcher(
        workers,
        RenderPoolConfig(**config),
        lambda job: (None, batch_size),
        {"torch": "2"},
        clock=lambda: workers.now_s,
    )


def jobs(count: int) -> Iterator[RenderJob]:
    for seed in range(count):
        yield RenderJob(Sample(f"sample-{seed // 8}", "paint"), "words", seed)


def seeds_of(outcomes: Iterable[tuple[int, Any]]) -> dict[int, Any]:
    """Job number -> the seed that its picture shows, or its failure."""
    return {
        number: outcome.getpixel((0, 0))[0] if isinstance(outcome, Image.Image) else outcome
        for number, outcome in outcomes
    }
