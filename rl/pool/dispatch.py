"""Sends batches of render jobs to workers, and again elsewhere if a worker dies."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from PIL.Image import Image

from rl.api.types import RenderFailure, RenderJob, Sample
from rl.config.schema import RenderPoolConfig
from rl.console import duration, warn
from rl.pool import pool_worker
from rl.ranks import heartbeat, signals
from rl.renderers.diffusion_loop import OUT_OF_MEMORY, Fits, batches_of

if TYPE_CHECKING:
    pass

POLL_S = 0.5
LOOK_AT_WORKERS_S = 2.0
"""Interval at which workers that joined, died or hang are looked for."""
SILENT_S = 60.0
"""A worker that does not even answer `status` this long is restarted."""
SHORTEST_DEADLINE_S = 60.0
DEADLINE_FACTOR = 4.0
HEDGE_FACTOR = 2.0
"""A batch that takes this many medians is also sent to an idle worker once no other is left."""
WARN_EVERY_S = 60.0
ASK_REFUSED_AFTER_S = 60.0
"""A refused worker is greeted again after this: Ray may have restarted it elsewhere."""


class WorkerLostError(Exception):
    """The call got no answer: its worker died, was restarted, or cannot be reached."""


class Workers(Protocol):
    """The workers' side of a pool. A call is an opaque, hashable handle."""

    def names(self) -> Sequence[str]:
        """All workers that should exist; missing ones are started."""

    def call(self, worker: str, method: str, *arguments: Any) -> Any:
        """Start a call of a `Worker` method; does not wait."""

    def put(self, message: pool_worker.Message) -> Any:
        """Store a message once; the returned value is an argument for several calls."""

    def wait(self, calls: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        """The calls that are done; waits until one is, at most `timeout_s` (without calls: as
        long)."""

    def result(self, call: Any) -> Any:
        """The result of a call that is done. Raises WorkerLostError."""

    def restart(self, worker: str) -> None:
        """Kill a worker, which is started again."""

    def agree(self, reference: Reference | None) -> Reference | None:
        """The pool's reference; the first one that any rank gives is kept."""


@dataclass(frozen=True)
class Reference:
    """The first batch that the pool drew. Every worker must draw it with the same bits."""

    message: Any
    digests: Sequence[str]
    facts: Mapping[str, str]
    """Of the worker: versions, weights, GPU, dtype, threads."""


@dataclass(eq=False)
class Batch:
    """Jobs that are drawn together; every worker gets the same ones in the same order."""

    key: Hashable
    numbers: list[int]
    """The jobs' numbers."""
    jobs: list[RenderJob]
    message: Any = None
    method: Literal["draw", "prepare"] = "draw"
    """The worker's; it is called with the message."""
    arguments: tuple[Any, ...] = ()
    tries: int = 0
    is_done: bool = False


@dataclass(eq=False)
class Running:
    """A call that draws `batch`."""

    batch: Batch
    worker: str
    incarnation: str
    since_s: float


@dataclass(eq=False)
class State:
    """What this rank knows of a worker."""

    stage: Literal["new", "asked", "checking", "ready", "refused"] = "new"
    call: Any = None
    """The pending call of `hello` or `draw` in stages 'asked' and 'checking'."""
    incarnation: str = ""
    """Changes when the worker is restarted."""
    facts: Mapping[str, str] = field(default_factory=dict)
    state_dim: int | None = None
    running: set[Any] = field(default_factory=set)
    status: Any = None
    status_since_s: float = 0.0
    reason: str = ""
    """Why it was lost or refused last."""
    refused: str = ""
    """The incarnation that was refused; another one is greeted again."""
    refused_s: float = 0.0
    answered_s: float = -math.inf
    """When a batch of this rank was last answered."""
    samples: deque[str] = field(default_factory=lambda: deque(maxlen=64))
    """Ids of the samples that it drew last; it has kept their source latents."""


class Dispatcher:
    """One rank's side of a pool."""

    def __init__(
        self,
        workers: Workers,
        config: RenderPoolConfig,
        batch_of: Callable[[RenderJob], tuple[Hashable, int]],
        expected: Mapping[str, str],
        first: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`expected`: facts of this rank, such as versions, that a worker must share. `first`: rank
        / number of ranks. A rank does not see how busy other ranks keep a worker, so each rank
        begins with another one."""
        self.workers = workers
        self.config = config
        self.reference: Reference | None = None
        self.restarts = 0
        self.num_remote = self.num_here = 0
        self.num_bytes = 0
        self._metrics: dict[str, list[tuple[float, int]]] = defaultdict(list)
        """Metric -> its mean over a batch, and the batch's pictures."""
        self._queue: list[tuple[int, float]] = []
        """Batches that no worker drew yet, and for how many seconds."""
        self._batch_of = batch_of
        self._expected = dict(expected)
        self._draw_here: Callable[[Sequence[RenderJob]], list[Any]] | None = None
        self._first = first
        self._clock = clock
        self._states: dict[str, State] = {}
        self._fits: Fits = {}
        self._longest_s = 0.0
        self._durations_s: deque[float] = deque(maxlen=100)
        self._looked_s = -1e9
        self._last_ready_s = clock()
        self._warned_s = -1e9

    def draws_here(
        self, draw: Callable[[Sequence[RenderJob]], list[Any]], facts: Mapping[str, str]
    ) -> None:
        """This rank draws too, with `draw`; workers must have the `facts` of its model."""
        self._draw_here = draw
        self._expected.update(facts)

    @property
    def ready(self) -> list[str]:
        return [name for name, state in self._states.items() if state.stage == "ready"]

    def state_dim(self) -> int | None:
        """Width of the states that the renderer reads, once a worker has loaded it. Raises
        RuntimeError if none can load it, or none has after `max_wait_s`."""
        self._last_ready_s = self._clock()
        while not signals.stop_received():  # the caller sees the signal
            self._look_at_workers()
            self._admit()
            for state in self._states.values():
                if state.stage in ("ready", "checking"):
                    return state.state_dim
            self._wait_or_give_up("starts")
        return None

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Any]]:
        """Yield `(number of the job, picture, failure or None)` as batches are done. Raises
        RuntimeError if no worker is left for `max_wait_s`, and what a renderer raises."""
        batches = (
            Batch(key, [number for number, _ in members], [job for _, job in members])
            for key, members in batches_of(jobs, self._batch_of, self._fits)
        )
        return self._drawn(batches)

    def _drawn(self, batches: Iterator[Batch]) -> Iterator[tuple[int, Any]]:
        queue: deque[Batch] = deque()
        running: dict[Any, Running] = {}
        all_taken = False
        self._last_ready_s = self._clock()
        try:
            while True:
                self._look_at_workers()
                self._admit()
                while (queue or not all_taken) and (self._has_slot(running) or self._draw_here):
                    batch = queue.popleft() if queue else next(batches, None)
                    if batch is not None and batch.is_done:
                        continue  # its twin was faster
                    if batch is None:
                        all_taken = True
                    elif worker := self._choose(batch, running):
                        self._send(batch, worker, running)
                    else:
                        yield from self._here(batch, queue)
                        break
                if all_taken and not queue and not running:
                    return
                if not self.ready and self._draw_here is None:
                    self._wait_or_give_up("is ready")
                heartbeat.note_wait()
                waits_for = [*running, *self._pending()]
                waiting = len(queue) + len(running) - len({r.worker for r in running.values()})
                began_s = self._clock()
                done = self.workers.wait(waits_for, POLL_S) if waits_for else []
                self._queue.append((waiting, self._clock() - began_s))
                if all_taken and not queue and not done:
                    self._hedge(running)
                for call in [call for call in done if call in running]:
                    yield from self._finish(running.pop(call), call, queue)
                for call in [call for call, each in running.items() if each.batch.is_done]:
                    del running[call]  # its twin was faster
                for state in self._states.values():
                    state.running &= running.keys()
                if signals.stop_received():
                    rest = [*queue, *(each.batch for each in running.values())]
                    if batch := next(iter(rest), None) or next(batches, None):
                        # The caller sees the signal, and drops this picture.
                        yield batch.numbers[0], RenderFailure("the run is asked to stop")
                    return
        finally:
            for state in self._states.values():
                state.running.clear()

    def prepare(self, method: str, samples: Sequence[Sample], *arguments: Any) -> list[Sample]:
        """Have a worker call the renderer's `encode_sources` or `decode_sources`. Raises ValueError
        if that does, RuntimeError if no worker answers."""
        message = self.workers.put(pool_worker.packed_samples(samples))
        batch = Batch(None, [0], [], message, "prepare", (method, *arguments))
        [(_, made)] = self._drawn(iter([batch]))
        if isinstance(made, RenderFailure):
            if signals.stop_received():
                return list(samples)  # the caller sees the signal
            raise RuntimeError(f"render_pool: no worker answers {method} ({made.reason})")
        return [
            replace(sample, **{name: getattr(prepared, name) for name in pool_worker.PREPARED})
            for sample, prepared in zip(samples, pool_worker.unpacked_samples(made), strict=True)
        ]

    def take_metrics(self) -> dict[str, float]:
        """The renderer's metrics, as means over the pictures, and the pool's own."""
        metrics = {
            name: sum(value * count for value, count in values) / sum(count for _, count in values)
            for name, values in self._metrics.items()
        }
        if drawn := self.num_remote + self.num_here:
            metrics["pool_remote_share"] = self.num_remote / drawn
        if waited_s := sum(seconds for _, seconds in self._queue):
            metrics["pool_queue"] = sum(n * seconds for n, seconds in self._queue) / waited_s
        counts = {"pool_workers": len(self.ready), "pool_restarts": self.restarts}
        metrics |= {**counts, "pool_mb": self.num_bytes / 1e6}
        self._metrics.clear()
        self._queue.clear()
        self.num_remote = self.num_here = self.num_bytes = self.restarts = 0
        return metrics

    def _here(self, batch: Batch, queue: deque[Batch]) -> Iterator[tuple[int, Any]]:
        assert self._draw_here is not None
        outcomes = self._draw_here(batch.jobs)
        packed = pool_worker.packed_outcomes(outcomes)
        if _lacked_memory(packed):
            yield from self._smaller(batch, packed, queue)
            return
        batch.is_done = True
        self.num_here += len(outcomes)
        self._propose(batch, packed, self._expected)
        yield from zip(batch.numbers, outcomes, strict=True)

    def _propose(
        self, batch: Batch, packed: list[Any], facts: Mapping[str, str], drawn_by: str = ""
    ) -> bool:
        """Without a reference, make it this batch if all of its pictures were drawn; every other
        worker is checked from now on. Returns whether the pictures may be used: False if another
        rank's reference was first, which this worker has not drawn yet."""
        if self.reference is not None or any(isinstance(each, tuple) for each in packed):
            return True
        found = Reference(self._message(batch), pool_worker.digests_of(packed), facts)
        self.reference = self.workers.agree(found) or found
        is_equal = list(self.reference.digests) == found.digests
        for name, each in self._states.items():
            if each.stage == "ready" and not (is_equal and name == drawn_by):
                each.stage = "new"
        self._looked_s = -1e9
        return is_equal

    def _has_slot(self, running: Mapping[Any, Running]) -> bool:
        """Whether a worker can take a batch. Without a reference one batch is drawn at a time: the
        first that is done becomes the reference."""
        if self.reference is None and running:
            return False
        limit = self.config.batches_per_worker
        return any(len(self._states[name].running) < limit for name in self.ready)

    def _choose(self, batch: Batch, running: Mapping[Any, Running]) -> str | None:
        """The least busy worker, at equal load one that has drawn of the same sample."""
        if not self._has_slot(running) or (self.reference is None and self._draw_here):
            return None
        ids = {job.sample.id for job in batch.jobs}
        ready = self.ready
        start = int(self._first * len(ready))
        return min(
            ready[start:] + ready[:start],
            key=lambda name: (
                len(self._states[name].running),
                ids.isdisjoint(self._states[name].samples),
            ),
        )

    def _message(self, batch: Batch) -> Any:
        if batch.message is None:
            packed = pool_worker.packed_jobs(batch.jobs)
            self.num_bytes += sum(array.nbytes for array in packed["arrays"])
            batch.message = self.workers.put(packed)
        return batch.message

    def _send(self, batch: Batch, worker: str, running: dict[Any, Running]) -> None:
        call = self.workers.call(worker, batch.method, self._message(batch), *batch.arguments)
        state = self._states[worker]
        state.running.add(call)
        state.samples.extend(job.sample.id for job in batch.jobs)
        running[call] = Running(batch, worker, state.incarnation, self._clock())

    def _hedge(self, running: dict[Any, Running]) -> None:
        """Send the oldest batch that is a straggler to an idle worker, once."""
        idle = [name for name in self.ready if not self._states[name].running]
        if not idle or len(self._durations_s) < 3:
            return
        limit_s = HEDGE_FACTOR * statistics.median(self._durations_s)
        calls_of: dict[Batch, list[Running]] = {}
        for each in running.values():
            calls_of.setdefault(each.batch, []).append(each)
        alone = [calls[0] for calls in calls_of.values() if len(calls) == 1]
        slow = [each for each in alone if self._clock() - self._began_s(each) > limit_s]
        if slow:
            self._send(min(slow, key=self._began_s).batch, idle[0], running)

    def _began_s(self, running: Running) -> float:
        """When its worker could begin the batch, as it draws one after the other."""
        return max(running.since_s, self._states[running.worker].answered_s)

    def _finish(self, done: Running, call: Any, queue: deque[Batch]) -> Iterator[tuple[int, Any]]:
        """Yield a call's outcomes, or queue its batch again."""
        batch, state, now_s = done.batch, self._states[done.worker], self._clock()
        took_s, state.answered_s = now_s - self._began_s(done), now_s
        try:
            reply = self.workers.result(call)
        except WorkerLostError as error:
            if done.incarnation == state.incarnation:  # else another call has reported it
                self._lost(done.worker, str(error))
            yield from self._again(batch, f"worker_lost: {error}", queue)
            return
        if batch.is_done:
            return
        if reply["incarnation"] != done.incarnation:  # restarted, and not checked since
            state.stage = "new"
            yield from self._again(batch, "worker_lost: it was restarted", queue)
            return
        if raised := reply.get("raised"):  # by the renderer
            kind = ValueError if raised[0] == "ValueError" else RuntimeError
            raise kind(f"render_pool: {done.worker}: {raised[1]}")
        outcomes = reply["outcomes"]
        if batch.method == "prepare":
            batch.is_done = True
            yield 0, outcomes
            return
        if _lacked_memory(outcomes):
            yield from self._smaller(batch, outcomes, queue)
            return
        for name, value in reply["metrics"].items():
            self._metrics[name].append((value, len(batch.jobs)))
        self._durations_s.append(max(took_s, reply["seconds"]))
        self._longest_s = max(self._longest_s, reply["seconds"])
        if not self._propose(batch, outcomes, state.facts, done.worker):
            queue.appendleft(batch)  # for a worker that has been checked
            return
        batch.is_done = True
        self.num_remote += len(outcomes)
        self.num_bytes += sum(each.nbytes for each in outcomes if hasattr(each, "nbytes"))
        for number, packed in zip(batch.numbers, outcomes, strict=True):
            outcome = pool_worker.unpacked_outcome(packed)
            if isinstance(outcome, Image):
                outcome.info["drawn_by"] = done.worker
            yield number, outcome

    def _again(self, batch: Batch, reason: str, queue: deque[Batch]) -> Iterator[tuple[int, Any]]:
        if batch.is_done or batch in queue:
            return
        batch.tries += 1
        if batch.tries < self.config.max_tries:
            queue.appendleft(batch)
            return
        batch.is_done = True
        failure = RenderFailure(f"{reason} (after {batch.tries} tries)")
        yield from ((number, failure) for number in batch.numbers)

    def _smaller(
        self, batch: Batch, outcomes: list[Any], queue: deque[Batch]
    ) -> Iterator[tuple[int, Any]]:
        """Draw a batch that did not fit in memory in two halves, and later ones of its key in
        batches of that size: on every worker, so that all still draw the same bits."""
        if len(batch.jobs) == 1:
            yield from self._again(batch, outcomes[0][0], queue)
            return
        batch.is_done = True
        half = (len(batch.jobs) + 1) // 2
        self._fits[batch.key] = min(half, self._fits.get(batch.key, half))
        warn(
            f"renderer.batch_size: {len(batch.jobs)} pictures of one size do not fit in a worker's "
            f"memory, from now on {half}"
        )
        for part in (slice(half, None), slice(half)):
            queue.appendleft(Batch(batch.key, batch.numbers[part], batch.jobs[part]))

    def _look_at_workers(self) -> None:
        """Greet new workers and restart those that hang, at most every few seconds."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_AT_WORKERS_S and self._states:
            return
        self._looked_s = now_s
        names = self.workers.names()
        self._states = {name: self._states.get(name) or State() for name in names}
        for name, state in self._states.items():
            if state.stage == "refused" and now_s - state.refused_s > ASK_REFUSED_AFTER_S:
                state.stage = "new"
            if state.stage == "new":
                state.stage, state.call = "asked", self.workers.call(name, "hello")
            elif state.running or state.stage == "checking":
                self._restart_if_hung(name, state, now_s)

    def _restart_if_hung(self, name: str, state: State, now_s: float) -> None:
        limit_s = max(SHORTEST_DEADLINE_S, DEADLINE_FACTOR * self._longest_s)
        if not self._longest_s or state.stage == "checking":  # it may compile
            limit_s = max(limit_s, self.config.first_batch_s)
        if state.status is None:
            state.status, state.status_since_s = self.workers.call(name, "status"), now_s
            return
        if not self.workers.wait([state.status], 0.0):
            if now_s - state.status_since_s > SILENT_S:
                self._hung(name, f"has not answered for {duration(SILENT_S)}")
            return
        try:
            drawing_s = self.workers.result(state.status)
        except WorkerLostError as error:
            self._lost(name, str(error))
            return
        state.status = None
        if drawing_s > limit_s:
            self._hung(name, f"has drawn one batch for {duration(drawing_s)}")

    def _hung(self, name: str, what: str) -> None:
        self.workers.restart(name)
        self._lost(name, f"it {what}, and is restarted")

    def _lost(self, name: str, reason: str) -> None:
        """Forget a worker's answers, so that it is greeted again: at once if it had loaded the
        renderer, else when workers are looked at next."""
        state = self._states[name]
        state.reason = reason
        if state.incarnation:
            self.restarts += 1
            self._looked_s = -1e9
            warn(f"render_pool: {name} is lost ({reason}); its batches are drawn elsewhere")
        state.stage, state.call, state.status, state.incarnation = "new", None, None, ""

    def _pending(self) -> list[Any]:
        """The calls whose answers decide whether a worker is used."""
        return [s.call for s in self._states.values() if s.stage in ("asked", "checking")]

    def _admit(self) -> None:
        """Move workers forward whose `hello` or check is answered."""
        for name, state in self._states.items():
            if state.stage not in ("asked", "checking"):
                continue
            if not self.workers.wait([state.call], 0.0):
                continue
            try:
                reply = self.workers.result(state.call)
            except WorkerLostError as error:
                self._lost(name, str(error))
                continue
            if state.stage == "asked":
                self._greet(name, state, reply)
            else:
                self._check(name, state, reply)
        if self.ready:
            self._last_ready_s = self._clock()

    def _greet(self, name: str, state: State, hello: Mapping[str, Any]) -> None:
        state.facts, state.incarnation = hello["facts"], hello["incarnation"]
        state.state_dim = hello["state_dim"]
        if problem := hello.get("error"):
            self._refuse(name, state, f"cannot load the renderer: {problem}")
            return
        if state.incarnation == state.refused:
            self._refuse(name, state, state.reason)
            return
        if self.reference is None:
            self.reference = self.workers.agree(None)
        wanted = {**self._expected, **(self.reference.facts if self.reference else {})}
        if wrong := [
            f"{k} {state.facts.get(k)!r} instead of {v!r}"
            for k, v in wanted.items()
            if state.facts.get(k) != v
        ]:
            self._refuse(name, state, "has " + ", ".join(wrong))
        elif self.reference is None:
            state.stage = "ready"
        else:
            asked = (self.reference.message, list(self.reference.digests))
            state.stage, state.call = "checking", self.workers.call(name, "check", *asked)

    def _check(self, name: str, state: State, reply: Mapping[str, Any]) -> None:
        assert self.reference is not None
        if reply["incarnation"] != state.incarnation:
            state.stage = "new"
        elif raised := reply.get("raised"):
            self._refuse(name, state, f"cannot draw the first batch: {raised[1]}")
        elif reply["digests"] != list(self.reference.digests):
            self._refuse(
                name,
                state,
                "draws other bits of the first batch than the pool: it has other weights, kernels "
                "or settings",
            )
        else:
            state.stage = "ready"

    def _refuse(self, name: str, state: State, reason: str) -> None:
        if state.refused != state.incarnation:
            warn(f"render_pool: {name} is not used: it {reason}")
        state.stage, state.reason, state.refused = "refused", reason, state.incarnation
        state.refused_s = self._clock()

    def _wait_or_give_up(self, what: str) -> None:
        """Called while no worker is ready."""
        heartbeat.note_wait()
        now_s = self._clock()
        waited_s = now_s - self._last_ready_s
        refused = [name for name, state in self._states.items() if state.stage == "refused"]
        if waited_s > self.config.max_wait_s or (refused and len(refused) == len(self._states)):
            raise RuntimeError(
                f"render_pool: no worker {what} after {duration(waited_s)}; `rl pool status` and "
                "`ray status` say more. The run resumes with the same command "
                "(render_pool.max_wait_s)"
                + "".join(f"\n{n}: {s.reason or 'no place yet'}" for n, s in self._states.items())
            )
        if waited_s > WARN_EVERY_S / 4 and now_s - self._warned_s > WARN_EVERY_S:
            self._warned_s = now_s
            warn(
                f"render_pool: no worker {what} for {duration(waited_s)} now; the run waits up to "
                f"{duration(self.config.max_wait_s)} (render_pool.max_wait_s)"
            )
        self.workers.wait(self._pending(), POLL_S)


def _lacked_memory(outcomes: Sequence[Any]) -> bool:
    """Whether a picture failed because the batch did not fit in memory."""
    return any(isinstance(each, tuple) and each[0].startswith(OUT_OF_MEMORY) for each in outcomes)
