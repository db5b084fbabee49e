"""A renderer whose pictures are drawn by actors of a Ray cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import count
from multiprocessing.connection import Pipe
from typing import Any

import torch
from PIL import Image

from rl.api.metric import Metric
from rl.api.plugin import Resources
from rl.api.renderer import Renderer
from rl.api.types import HiddenStates, RenderFailure, RenderJob, Sample
from rl.config.schema import RunConfig
from rl.pool import ray_process
from rl.pool.ray_process import Done, Failed, Start, State, Task, receive, send
from rl.printing import environment_without
from rl.ranks import heartbeat, signals
from rl.ranks.dist import Dist
from rl.renderers.diffusion_loop import OUT_OF_MEMORY, Fits, batches_of

METRICS: Mapping[str, Metric] = {
    "pool_workers": Metric("workers", "of the render pool that could draw at the end"),
    "pool_restarts": Metric("workers", "lost, in whose place others were started"),
}
CLOSE_S = 60.0
"""How long the process may take to leave Ray."""
STOP_S = 2.0
"""Ray may end a little before the rank of a signal that asks both to stop."""


class PooledRenderer(Renderer[Any]):
    """Has the interface of the renderer that the pool's actors run. Which batch a picture is drawn
    in does not depend on the actors, so their number changes no bit."""

    def __init__(self, plugin: Any, config: RunConfig, dist: Dist) -> None:
        """Starts a process that uses Ray, and with it the actors, which load the renderer
        meanwhile. Collective. `plugin`: the renderer's (`build.Plugin`). Raises
        ValueError on all ranks if the cluster cannot be used on one."""
        super().__init__(plugin.config, Resources(None, dist.device))
        self._cls = plugin.cls
        self._fits: Fits = {}
        self._numbers = count()
        self._state = State(0, 0, None)
        self._failed: Failed | None = None
        self._lost_before = 0
        self._metrics: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        spec = ray_process.spec_of(plugin.cls, plugin.config, torch.get_num_threads(), dist.device)
        spec["name"] = "run-" + blake2b(bytes(config.run_dir.absolute()), digest_size=6).hexdigest()
        failure = ""
        try:
            start = Start(spec, config.render_pool, dist.rank / dist.world_size)
            self.where = self._started(start)
        except Exception as error:
            failure = f"rank {dist.rank}: {str(error) or type(error).__name__}"
        if failures := list(filter(None, dist.gather(failure))):
            raise ValueError(failures[0])

    def _started(self, start: Start) -> str:
        """Start the process; returns the cluster that it found."""
        self._pipe, child = Pipe()
        program = "import sys; from rl.pool.ray_process import main; main(int(sys.argv[1]))"
        # In a session of its own: what stops a run must not reach Ray before the run has saved.
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, str(child.fileno())],
            env=environment_without("RAY_AUTH_TOKEN"),
            stdin=subprocess.DEVNULL,
            pass_fds=[child.fileno()],
            start_new_session=True,
        )
        child.close()
        with suppress(ConnectionError):  # `_received` says so
            send(self._pipe, start)
        found = self._received(timeout_s=None)
        if found is None:
            raise RuntimeError("the run was asked to stop while it connected to Ray")
        return str(found)

    def wait(self) -> None:
        """Wait until an actor has loaded the renderer. Raises RuntimeError if none can."""
        while self._state.num_ready == 0 and not signals.stop_received():  # the caller sees it
            self._received()
        self.state_dim = self._state.state_dim

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Any]]:
        """Raises RuntimeError if no actor is left, and what the renderer raises."""
        batches = batches_of(jobs, lambda job: self._cls.batch_of(self.config, job), self._fits)
        halves: list[Any] = []
        sent: dict[int, Any] = {}
        while True:
            # What the actors take, and one more.
            while len(sent) <= ray_process.AT_ONCE * self._state.num_ready:
                batch = halves.pop() if halves else next(batches, None)
                if batch is None:
                    break
                sent[self._send("draw", packed(job for _, job in batch[1]))] = batch
            if not sent:
                return
            done = self._received()
            if signals.stop_received():  # the caller sees it, and drops this picture
                _, [(number, _), *_] = next(iter(sent.values()))
                yield number, RenderFailure("the run is asked to stop")
                return
            if isinstance(done, Done) and done.number in sent:
                key, members = sent.pop(done.number)
                if _lacked_memory(done.result) and len(members) > 1:
                    # Later ones, too: every actor draws the same batches, and so the same bits.
                    half = (len(members) + 1) // 2
                    self._fits[key] = min(half, self._fits.get(key, half))
                    halves += [(key, members[half:]), (key, members[:half])]
                    continue
                yield from self._outcomes(done, members)

    def _outcomes(self, done: Done, members: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for name, value in done.metrics.items():
            self._metrics[name].append((value, len(members)))
        outcomes = done.result
        if isinstance(outcomes, RenderFailure):
            outcomes = [outcomes] * len(members)
        for (number, _), outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, Image.Image):
                outcome.info["drawn_by"] = done.drawn_by
            yield number, outcome

    def encode_sources(self, samples: Sequence[Sample], area_px: int) -> list[Sample]:
        return self._prepared("encode_sources", samples, area_px)

    def decode_sources(self, samples: Sequence[Sample]) -> list[Sample]:
        return self._prepared("decode_sources", samples)

    def _prepared(self, method: str, samples: Sequence[Sample], *arguments: Any) -> list[Sample]:
        if getattr(self._cls, method) is getattr(Renderer, method):
            return list(samples)
        number = self._send("prepare", method, samples, *arguments)
        while not signals.stop_received():  # the caller sees it
            done = self._received()
            if isinstance(done, Done) and done.number == number:
                if isinstance(done.result, RenderFailure):
                    raise RuntimeError(f"render_pool: {method}: {done.result.reason}")
                return list(done.result)
        return list(samples)

    def _send(self, kind: ray_process.Kind, *arguments: Any) -> int:
        number = next(self._numbers)
        with suppress(ConnectionError):  # the next `_received` says so
            send(self._pipe, Task(number, kind, arguments))
        return number

    def _received(self, timeout_s: float | None = ray_process.POLL_S) -> Any:
        """The process's next message; None if none comes. Raises RuntimeError."""
        if self._state.num_ready == 0:  # else a hang of all actors is one of the run
            heartbeat.note_wait()
        try:
            message = self._failed
            if message is None and self._pipe.poll(timeout_s):
                message = receive(self._pipe)
        except (EOFError, ConnectionError):
            time.sleep(STOP_S)
            if signals.stop_received():
                return None
            message = Failed(ray_process.RAY_ENDED)
        if isinstance(message, Failed):
            self._failed = message
            raise RuntimeError(message.text)
        if message is not None:
            heartbeat.note_wait()
        if isinstance(message, State):
            self._state = message
        return message

    def take_metrics(self) -> Mapping[str, float]:
        """The renderer's metrics, as means over the pictures, and the pool's own."""
        means = {
            name: sum(value * n for value, n in values) / sum(n for _, n in values)
            for name, values in self._metrics.items()
        }
        self._metrics.clear()
        num_lost = self._state.num_lost - self._lost_before
        self._lost_before = self._state.num_lost
        return means | {"pool_workers": self._state.num_ready, "pool_restarts": num_lost}

    def close(self) -> None:
        """Leave the cluster, and end this rank's actors."""
        self._pipe.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)


def packed(jobs: Iterable[RenderJob]) -> list[RenderJob]:
    """The jobs without what only rewards read, their states in host memory; a tensor that several
    jobs share is sent once."""
    moved: dict[int, torch.Tensor] = {}
    jobs = list(jobs)  # keeps the tensors, and so their ids

    def on_cpu(tensor: torch.Tensor | None) -> Any:
        if tensor is not None and id(tensor) not in moved:
            # A copy: of a view, pickle would send the whole storage.
            moved[id(tensor)] = tensor.detach().cpu().clone()
        return None if tensor is None else moved[id(tensor)]

    made = []
    for job in jobs:
        payload = job.payload
        if isinstance(payload, HiddenStates):
            embeds, negative = on_cpu(payload.embeds), on_cpu(payload.negative_embeds)
            payload = replace(payload, embeds=embeds, negative_embeds=negative)
        sample = replace(job.sample, target=None, target_codes=None, hidden={})
        made.append(replace(job, sample=sample, payload=payload))
    return made


def _lacked_memory(outcomes: Any) -> bool:
    """Whether a picture failed because the batch did not fit in memory."""
    return isinstance(outcomes, list) and any(
        isinstance(each, RenderFailure) and each.reason.startswith(OUT_OF_MEMORY)
        for each in outcomes
    )


def pooled(plugin: Any, config: RunConfig, dist: Dist) -> PooledRenderer:
    """The renderer of `plugin` in the pool of `config`, with the metrics of both."""
    members = {"metrics": {**plugin.cls.metrics, **METRICS}, "accepts": plugin.cls.accepts}
    made: PooledRenderer = type("Pooled", (PooledRenderer,), members)(plugin, config, dist)
    return made
