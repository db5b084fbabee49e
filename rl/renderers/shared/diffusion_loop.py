"""Draws batches of jobs with a frozen diffusion model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from PIL.Image import Image

from rl.api.plugin import FrozenModelConfig
from rl.api.types import RenderFailure, RenderJob
from rl.files import over_white
from rl.renderers.shared.batches import Fits, Outcome, render_in_batches
from rl.renderers.shared.decoding import to_pictures

ConfigT = TypeVar("ConfigT", bound=FrozenModelConfig)
BucketT = TypeVar("BucketT", bound=Hashable)


class DiffusionLoop(ABC, Generic[ConfigT, BucketT]):
    """Draws the jobs of one bucket together. A picture depends only on its own job: the other jobs
    of the batch change it only by float rounding."""

    state_dim: int | None = None
    """Width of the hidden states that the renderer reads; None if it reads none."""

    def __init__(self, config: ConfigT, parts: Any, vae_factor: int) -> None:
        """`vae_factor`: the sides of pictures for the VAE are multiples of this, px."""
        from diffusers.image_processor import VaeImageProcessor

        self.config = config
        self.parts = parts
        self._pixels = VaeImageProcessor(vae_scale_factor=vae_factor)
        self.may_split = True
        """Whether a batch that does not fit in memory is halved; else it fails."""
        self._fits: Fits = {}

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Outcome]]:
        """Yield `(number of the job, picture or failure)`, batch by batch, as batches fill.

        Pictures are RGB; transparent parts become white. An exception in a batch fails only the
        jobs of this batch. A batch that does not fit in memory is halved until it fits.
        """
        return render_in_batches(
            jobs,
            lambda job: (self.bucket_of(self.config, job), self.config.batch_size),
            self._failure_of,
            lambda batch, bucket: to_pictures(self.render_tensor(batch, bucket), self._as_images),
            self._fits,
            self.may_split,
        )

    def take_metrics(self) -> dict[str, float]:
        """The plugin's `metrics` since the last call."""
        return {}

    def _as_images(self, tensor: torch.Tensor) -> list[Image]:
        return list(map(over_white, self._pixels.postprocess(tensor, output_type="pil")))

    @staticmethod
    @abstractmethod
    def bucket_of(config: Any, job: RenderJob) -> Any:
        """The settings that jobs must share to be drawn in one batch; hashable."""

    def _failure_of(self, job: RenderJob) -> RenderFailure | None:
        """Why a job cannot be drawn; None if it can."""
        return None

    @abstractmethod
    def render_tensor(self, jobs: Sequence[RenderJob], bucket: BucketT) -> torch.Tensor:
        """Render jobs of one bucket: [B, 3 or 4, H, W], the renderer's dtype, nominally -1..1."""
