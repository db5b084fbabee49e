"""Simulates one iteration of a run with any number of render workers and judges.

Ranks sample, condition their groups, hand batches of pictures to workers (or draw them), and learn
from groups whose verdicts have arrived. The judge is asked as soon as a picture is drawn.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

WINDOW = 2
"""Batches that a worker holds at most: the one that it draws, and the next."""
MOST_WORKERS = 512
WORTH_IT = 0.01
"""Share of an iteration that more workers have to save."""
TIMES = {
    "sample_s": "sampling",
    "condition_s": "conditioning",
    "draw_s": "drawing",
    "picture_bytes": "the network",
    "judge_s": "the judge",
    "learn_s": "learning",
    "sync_s": "step and sync",
}
"""Field of `Iteration` -> what bounds an iteration if this field does."""


@dataclass(frozen=True)
class Iteration:
    """The work of one iteration and how long its parts take, without waiting for others."""

    num_ranks: int
    num_groups: int
    """Groups of each rank."""
    group_size: int
    """Distinct pictures of a group, that of the bare arm included."""
    batch_size: int
    """Pictures that a GPU draws at once; a rank's last batch may have fewer."""
    questions: int
    """Judge requests about one picture; they may run side by side."""
    sample_s: float
    """A rank's completions."""
    condition_s: float
    """One group, on the rank's GPU."""
    draw_s: float
    """One picture; a batch takes as long as its pictures one by one."""
    judge_s: float
    """One request in one of the judge's slots."""
    learn_s: float
    """One group's share of the optimizer steps, on the rank's GPU."""
    sync_s: float
    """Everything after the last backward: weight sync, records."""
    picture_bytes: float = 0.0
    """Sent for one picture drawn by a worker: states, and the picture back."""
    ranks_per_node: int = 8

    @property
    def num_pictures(self) -> int:
        """Pictures of one rank."""
        return self.num_groups * self.group_size


@dataclass(frozen=True)
class Machines:
    """What works beside the ranks."""

    workers: int = 0
    """GPUs of the pool; 0: the ranks draw the pictures themselves."""
    judge_slots: int = 1
    """Requests that the judges answer at once, each within `judge_s`."""
    bytes_per_s: float = 1.25e9
    """Between each node of ranks and the workers."""
    local: bool = False
    """Whether the ranks draw pictures beside the workers."""


@dataclass(frozen=True)
class Outcome:
    """A simulated iteration, in seconds."""

    total_s: float
    phases_s: Mapping[str, float]
    """Of the rank that ends last, waits included, by the names of `time/<phase>_s`; their sum is
    `total_s`."""
    worker_use: float
    """Share of the time in which a worker draws, 0 to 1; 0 without workers."""
    judge_use: float
    """The same of a judge's slot."""


@dataclass(eq=False)
class _Rank:
    work: Iteration
    node: int
    num_conditioned: int = 0
    """Groups."""
    num_taken: int = 0
    """Pictures that are being drawn, or that are drawn."""
    num_drawn: int = 0
    is_busy: bool = False
    rendered_s: float = 0.0
    graded_s: list[float] = field(default_factory=list)
    """When the last verdict of each group arrived."""

    def next_batch(self) -> range:
        """The pictures of the next batch, if they are conditioned; else an empty range."""
        work, ready = self.work, self.num_conditioned * self.work.group_size
        end = min(self.num_taken + work.batch_size, work.num_pictures)
        return range(self.num_taken, end if end <= ready else self.num_taken)


class _Simulation:
    def __init__(self, work: Iteration, machines: Machines) -> None:
        self.work, self.machines, self.now_s = work, machines, work.sample_s
        self.ranks = [
            _Rank(work, number // work.ranks_per_node, graded_s=[0.0] * work.num_groups)
            for number in range(work.num_ranks)
        ]
        self.links_s: dict[int, float] = defaultdict(float)
        """Node -> when its link is free."""
        self.workers = [(0, 0.0, number) for number in range(machines.workers)]
        """(batches held, when all of them are drawn, number)."""
        self.least_busy = list(self.workers)
        """Heap of `workers`, with outdated entries."""
        self.num_drawn_remotely = 0
        self.slots_s = [0.0] * machines.judge_slots
        """Heap: when each slot of the judge is free."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self) -> None:
        """Simulate until the judge has graded every picture."""
        self._feed()
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            self._feed()

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _feed(self) -> None:
        """Give work to everyone who has none; the rank with the fewest pictures taken is first."""
        started = True
        while started:
            started = False
            for rank in sorted(self.ranks, key=lambda rank: rank.num_taken):
                started |= self._started(rank)

    def _started(self, rank: _Rank) -> bool:
        """Starts the next piece of a rank's work if a GPU can take it."""
        worker = self._free_worker()
        batch = rank.next_batch()
        draws = self.machines.local or not self.machines.workers
        if batch and worker is not None:
            self._send(rank, batch, worker)
        elif rank.is_busy or (worker is None and not draws):
            return False
        elif batch:
            rank.is_busy = True
            rank.num_taken = batch.stop
            end_s = self.now_s + len(batch) * self.work.draw_s
            self._at(end_s, lambda: self._drawn(rank, batch, None))
        elif rank.num_conditioned < self.work.num_groups:
            rank.is_busy = True
            self._at(self.now_s + self.work.condition_s, lambda: self._conditioned(rank))
        else:
            return False
        return True

    def _free_worker(self) -> int | None:
        """The worker with the fewest batches, and of these the one that is done first."""
        heap = self.least_busy
        while heap and heap[0] != self.workers[heap[0][2]]:
            heapq.heappop(heap)
        return heap[0][2] if heap and heap[0][0] < WINDOW else None

    def _hold(self, worker: int, batches: int, done_s: float) -> None:
        self.workers[worker] = (self.workers[worker][0] + batches, done_s, worker)
        heapq.heappush(self.least_busy, self.workers[worker])

    def _send(self, rank: _Rank, batch: range, worker: int) -> None:
        sent_s = len(batch) * self.work.picture_bytes / self.machines.bytes_per_s
        arrival_s = max(self.now_s, self.links_s[rank.node]) + sent_s
        self.links_s[rank.node] = arrival_s
        end_s = max(arrival_s, self.workers[worker][1]) + len(batch) * self.work.draw_s
        self._hold(worker, 1, end_s)
        rank.num_taken = batch.stop
        self._at(end_s, lambda: self._drawn(rank, batch, worker))

    def _conditioned(self, rank: _Rank) -> None:
        rank.is_busy = False
        rank.num_conditioned += 1

    def _drawn(self, rank: _Rank, batch: range, worker: int | None) -> None:
        if worker is None:
            rank.is_busy = False
        else:
            self._hold(worker, -1, self.workers[worker][1])
            self.num_drawn_remotely += len(batch)
        rank.num_drawn += len(batch)
        if rank.num_drawn == self.work.num_pictures:
            rank.rendered_s = self.now_s
        for picture in batch:
            group = picture // self.work.group_size
            rank.graded_s[group] = max(rank.graded_s[group], self._verdict_s())

    def _verdict_s(self) -> float:
        """When the judge has answered all questions about a picture that is drawn now."""
        end_s = self.now_s
        for _ in range(self.work.questions):
            answered_s = max(self.now_s, self.slots_s[0]) + self.work.judge_s
            heapq.heapreplace(self.slots_s, answered_s)
            end_s = max(end_s, answered_s)
        return end_s


def simulate(work: Iteration, machines: Machines) -> Outcome:
    """One iteration. A rank learns after it has rendered, group by group in their order."""
    simulation = _Simulation(work, machines)
    simulation.run()
    ends_s = []
    for rank in simulation.ranks:
        now_s = rank.rendered_s
        for graded_s in rank.graded_s:
            now_s = max(now_s, graded_s) + work.learn_s
        ends_s.append(now_s)
    end_s = max(ends_s)
    last = simulation.ranks[ends_s.index(end_s)]
    total_s = end_s + work.sync_s
    conditioning_s, learning_s = (work.num_groups * s for s in (work.condition_s, work.learn_s))
    pictures = work.num_ranks * work.num_pictures
    return Outcome(
        total_s,
        {
            "generate": work.sample_s,
            "condition": conditioning_s,
            "render": last.rendered_s - work.sample_s - conditioning_s,
            "judge_wait": end_s - last.rendered_s - learning_s,
            "learn": learning_s,
            "sync": work.sync_s,
        },
        simulation.num_drawn_remotely * work.draw_s / (total_s * max(1, machines.workers)),
        pictures * work.questions * work.judge_s / (total_s * machines.judge_slots),
    )


def bound_by(work: Iteration, machines: Machines) -> str:
    """What bounds the iteration: the part that, if 10 % faster, shortens the iteration most."""

    def seconds(name: str) -> float:
        return simulate(replace(work, **{name: 0.9 * getattr(work, name)}), machines).total_s

    return TIMES[min(TIMES, key=seconds)]


def enough_workers(work: Iteration, machines: Machines) -> int:
    """The number of workers beyond which all further ones (up to `MOST_WORKERS`) together save less
    than `WORTH_IT` of the iteration; 0 if no pool saves that."""

    def is_enough(workers: int) -> bool:
        total_s = simulate(work, replace(machines, workers=workers)).total_s
        return total_s * (1 - WORTH_IT) < least_s

    least_s = simulate(work, replace(machines, workers=MOST_WORKERS)).total_s
    if is_enough(0):
        return 0
    return 1 + bisect.bisect_left(range(1, MOST_WORKERS), True, key=is_enough)
