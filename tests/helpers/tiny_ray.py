"""Ray's part in a render pool, in one process: actors whose calls run one after the other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from multiprocessing.connection import Pipe
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from PIL import Image

from rl import build
from rl.api.plugin import PluginConfig
from rl.api.renderer import Renderer
from rl.api.types import RenderFailure, RenderJob, Sample
from rl.config.schema import load_config
from rl.pool import ray_process
from rl.pool.pooled_renderer import PooledRenderer, pooled
from rl.ranks.dist import Dist
from rl.renderers.diffusion_loop import OUT_OF_MEMORY


class RayError(Exception):
    actor_init_failed = False


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Killed(BaseException):
    """Raised inside an actor: its process dies."""


class Actor:
    def __init__(self, ray: FakeRay, cls: type, options: dict[str, Any], arguments: Any) -> None:
        self.ray, self.name, self.made = ray, options["name"], None
        self.is_dead, self.failed_to_start = False, ""
        self.make = lambda: cls(*arguments)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self.ray.called(self, method, arguments))


class FakeRay:
    """The parts of `ray` that `rl.pool.ray_process` uses."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.calls: list[tuple[Actor, str, Any]] = []
        self.results: dict[int, Any] = {}
        self.is_alive = True
        self.hangs: Callable[[Actor], bool] = lambda actor: False

    def remote(self, cls: type) -> Any:
        def options(**options: Any) -> Any:
            def made(*arguments: Any) -> Actor:
                known = self.actors.get(options["name"])
                if known is None or known.is_dead:
                    self.actors[options["name"]] = Actor(self, cls, options, arguments)
                return self.actors[options["name"]]

            return SimpleNamespace(remote=made)

        return SimpleNamespace(options=options)

    def called(self, actor: Actor, method: str, arguments: Any) -> int:
        self.calls.append((actor, method, arguments))
        return len(self.calls) - 1

    def wait(self, calls: Sequence[int], num_returns: int, timeout: float) -> Any:
        can_run = [call for call in calls if not self._is_stuck(call)]
        if not can_run:
            time.sleep(timeout)
            return [], calls
        first = min(can_run, key=lambda call: (call not in self.results, call))
        self._run(first)
        return [first], [call for call in calls if call != first]

    def get(self, call: int, timeout: float = 0) -> Any:
        self._run(call)
        if isinstance(self.results[call], Exception):
            raise self.results[call]
        return self.results[call]

    def _is_stuck(self, call: int) -> bool:
        actor = self.calls[call][0]
        return not actor.is_dead and self.hangs(actor)

    def _run(self, call: int) -> None:
        actor, method, arguments = self.calls[call]
        if call in self.results:
            return
        if actor.made is None and not actor.is_dead:
            try:
                actor.made = actor.make()
            except Exception as error:
                actor.is_dead, actor.failed_to_start = True, str(error)
        if actor.is_dead:
            self.results[call] = RayError(actor.failed_to_start or "the actor died")
            self.results[call].actor_init_failed = bool(actor.failed_to_start)
            return
        try:
            self.results[call] = getattr(actor.made, method)(*arguments)
        except Killed:
            self.kill(actor)
            self.results[call] = RayError("killed")
        except Exception as error:
            self.results[call] = RayTaskError(error)

    def kill(self, actor: Actor) -> None:
        actor.is_dead = True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "here", "Alive": self.is_alive}]

    def get_runtime_context(self) -> Any:
        return Mock(get_node_id=lambda: "here")

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 3.0}

    def shutdown(self) -> None:
        self.actors.clear()


class Painter(Renderer[PluginConfig]):
    """Paints a job's seed; `on_make` and `on_draw` of a test may raise, or change the picture."""

    accepts = "text"
    on_make: Callable[[], Any] = staticmethod(lambda: None)  # type: ignore[assignment]
    on_draw: Callable[[list[int]], Any] = staticmethod(lambda seeds: None)  # type: ignore[assignment]
    fits = 1000
    side_px = 2
    drawn: list[list[int]] = []

    def __init__(self, config: PluginConfig, resources: Any) -> None:
        super().__init__(config, resources)
        self.state_dim = 8
        self.shift = type(self).on_make() or 0

    @classmethod
    def batch_of(cls, config: PluginConfig, job: RenderJob) -> tuple[Hashable, int]:
        return None, 4

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Any]]:
        seeds = [job.noise_seed for job in jobs]
        self.on_draw(seeds)
        self.drawn.append(seeds)
        for number, seed in enumerate(seeds):
            if len(seeds) > self.fits:
                yield number, RenderFailure(f"{OUT_OF_MEMORY}: full")
            else:
                size = (self.side_px, self.side_px)
                yield number, Image.new("L", size, (seed + self.shift) % 256)

    def decode_sources(self, samples: Sequence[Sample]) -> list[Sample]:
        self.on_draw([])
        return list(samples)


def make_pool(monkeypatch: pytest.MonkeyPatch, ray: FakeRay, workers: int | str) -> PooledRenderer:
    """The rank's side of a pool on `ray`; the process beside it is a thread here."""
    monkeypatch.setattr(Painter, "drawn", [])
    monkeypatch.setattr(ray_process, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(ray_process, "POLL_S", 0.01)
    monkeypatch.setattr(ray_process, "connect", lambda address: ray)

    def started(self: PooledRenderer, start: Any) -> Any:
        self._pipe, child = Pipe()
        self._process = Mock()
        descriptor = os.dup(child.fileno())
        child.close()
        threading.Thread(target=ray_process.main, args=[descriptor], daemon=True).start()
        ray_process.send(self._pipe, start)
        return self._received(timeout_s=30)

    monkeypatch.setattr(PooledRenderer, "_started", started)
    config = load_config("configs/quickstart.jsonnet", [f"render_pool.workers={workers}"])
    plugin = build.Plugin("renderer", PluginConfig(type="tiny_ray.Painter"), Painter)
    return pooled(plugin, config, Dist())


def jobs(count: int) -> Iterator[RenderJob]:
    for seed in range(count):
        yield RenderJob(Sample(f"sample-{seed // 8}", "paint"), "words", seed)


def seeds_of(outcomes: Iterable[tuple[int, Any]]) -> dict[int, Any]:
    """Job number -> the seed that its picture shows, or its failure."""
    return {
        number: outcome.getpixel((0, 0)) if isinstance(outcome, Image.Image) else outcome
        for number, outcome in outcomes
    }
