"""A renderer whose pictures are drawn by a pool's workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from rl.api.metric import Metric
from rl.api.plugin import Resources
from rl.api.renderer import Renderer
from rl.api.types import RenderJob, Sample
from rl.config.schema import RenderPoolConfig
from rl.pool.dispatch import Dispatcher
from rl.pool.pool_worker import facts_of_code, facts_of_model, spec_of
from rl.ranks.dist import resolve_device

if TYPE_CHECKING:
    from rl.ranks.dist import Dist

METRICS: Mapping[str, Metric] = {
    "pool_workers": Metric("workers", "of the render pool that could draw at the end"),
    "pool_remote_share": Metric("0..1", "share of the pictures that the pool's workers drew"),
    "pool_restarts": Metric("workers", "lost or restarted because they hung"),
    "pool_queue": Metric("batches", "of a rank that no worker drew yet, mean while it waited"),
    "pool_mb": Metric("MB", "sent to and from the workers, by each rank"),
}


class PooledRenderer(Renderer[Any]):
    """Has the interface of the renderer that its workers run. Which batch a picture is drawn in
    does not depend on the workers, so their number changes no bit."""

    def __init__(self, plugin: Any, pool: RenderPoolConfig, dist: Dist, used: Set[str]) -> None:
        """Connects to Ray and starts the workers, which load the renderer meanwhile. Raises
        ValueError if the cluster cannot be used. `plugin`: the renderer's (`build.Plugin`);
        `used`: the run's own devices."""
        import torch

        from rl.pool import ray_cluster

        cls, config = plugin.cls, plugin.config
        super().__init__(config, Resources(None, dist.device))
        where = ray_cluster.connect(pool.address, dist, used=used)
        spec = spec_of(cls, config, torch.get_num_threads(), dist.device)
        workers = ray_cluster.RayWorkers(pool, spec)
        self._cls, self._pool, self._dist = cls, pool, dist
        self._here: Renderer[Any] | None = None
        self._disconnect = ray_cluster.disconnect
        self._dispatcher = Dispatcher(
            workers,
            pool,
            lambda job: cls.batch_of(config, job),
            facts_of_code(spec),
            first=dist.rank / dist.world_size,
        )
        workers.names()  # starts them
        self.where = f"{workers.name} on {where}"

    def wait(self) -> None:
        """Wait until a worker has loaded the renderer, after loading it here too if the ranks draw.
        Raises RuntimeError if no worker can."""
        if self._pool.local:
            resources = Resources(None, self._dist.device, may_split=False)
            self._here = self._cls(self.config, resources)
            device = resolve_device(getattr(self.config, "device", "auto"), self._dist.device)
            self._dispatcher.draws_here(self._draw_here, facts_of_model(self._here, device))
        self.state_dim = self._dispatcher.state_dim()

    def _draw_here(self, jobs: Sequence[RenderJob]) -> list[Any]:
        assert self._here is not None
        drawn = dict(self._here.render(jobs))
        return [drawn[number] for number in range(len(jobs))]

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Any]]:
        return self._dispatcher.render(jobs)

    def encode_sources(self, samples: Sequence[Sample], area_px: int) -> list[Sample]:
        return self._prepared("encode_sources", samples, area_px)

    def decode_sources(self, samples: Sequence[Sample]) -> list[Sample]:
        return self._prepared("decode_sources", samples)

    def _prepared(self, method: str, samples: Sequence[Sample], *arguments: Any) -> list[Sample]:
        if getattr(self._cls, method) is getattr(Renderer, method):
            return list(samples)
        if self._here is not None:
            return list(getattr(self._here, method)(samples, *arguments))
        return self._dispatcher.prepare(method, samples, *arguments)

    def take_metrics(self) -> Mapping[str, float]:
        return self._dispatcher.take_metrics()

    def close(self) -> None:
        if self._here is not None:
            self._here.close()
        self._disconnect(self._dist.world_size)


def pooled(plugin: Any, pool: RenderPoolConfig, dist: Dist, used: Set[str]) -> PooledRenderer:
    """The renderer of `plugin` in a pool, with the metrics of both."""
    metrics = {**plugin.cls.metrics, **METRICS}
    members = {"metrics": metrics, "accepts": plugin.cls.accepts}
    made: PooledRenderer = type("Pooled", (PooledRenderer,), members)(plugin, pool, dist, used)
    return made
