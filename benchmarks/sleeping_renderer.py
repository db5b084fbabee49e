"""A renderer plugin that sleeps instead of drawing, to measure pools without a model."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator

from PIL import Image

from rl.api.plugin import PluginConfig
from rl.api.renderer import Renderer
from rl.api.types import RenderJob

SECONDS, BATCH = 0.25, 2
"""Per picture; pictures per batch."""
Config = PluginConfig


class SleepingRenderer(Renderer[PluginConfig]):
    """A picture's colour is its noise seed."""

    accepts = "text"
    runs_model = True

    @classmethod
    def batch_of(cls, config: PluginConfig, job: RenderJob) -> tuple[Hashable, int]:
        return None, BATCH

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Image.Image]]:
        for number, job in enumerate(jobs):
            time.sleep(SECONDS)
            yield number, colour_of(job.noise_seed)


def colour_of(seed: int) -> Image.Image:
    return Image.new("RGB", (64, 64), (seed % 256, seed // 256 % 256, 7))
