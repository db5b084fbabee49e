"""A renderer plugin that sleeps instead of drawing, to measure pools without a model."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator

from PIL import Image

from rl.api.plugin import PluginConfig, Resources
from rl.api.renderer import Renderer
from rl.api.types import RenderJob


class Config(PluginConfig):
    """`renderer: { type: 'benchmarks.sleeping_renderer', ... }`."""

    seconds: float = 0.25
    """Per picture."""
    batch_size: int = 2
    """Pictures per batch."""
    load_s: float = 0.0
    """What loading takes."""


class SleepingRenderer(Renderer[Config]):
    """A picture's colour is its noise seed."""

    accepts = "text"
    runs_model = True

    def __init__(self, config: Config, resources: Resources) -> None:
        super().__init__(config, resources)
        time.sleep(config.load_s)

    @classmethod
    def batch_of(cls, config: Config, job: RenderJob) -> tuple[Hashable, int]:
        return None, config.batch_size

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Image.Image]]:
        for number, job in enumerate(jobs):
            time.sleep(self.config.seconds)
            yield number, colour_of(job.noise_seed)


def colour_of(seed: int) -> Image.Image:
    return Image.new("RGB", (64, 64), (seed % 256, seed // 256 % 256, 7))
