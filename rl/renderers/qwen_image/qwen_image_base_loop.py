"""What the render loops of the Qwen-Image plugins share: sources, positions and the schedule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from cachetools import LRUCache
from PIL.Image import Image

from rl.api.types import HiddenStates, RenderFailure, RenderJob
from rl.files.images import digest
from rl.renderers.qwen_image.denoising_config import PATCH_PX, DenoisingConfig, Size
from rl.renderers.qwen_image.qwen_image_components import EditorParts
from rl.renderers.shared.diffusion_loop import DiffusionLoop
from rl.renderers.shared.scheduling import prepared

NUM_KEPT_SOURCES = 64
"""Latents kept between batches and calls (0.5 MB each at 1024^2 in bfloat16)."""

ConfigT = TypeVar("ConfigT", bound=DenoisingConfig)
BucketT = TypeVar("BucketT", bound=Hashable)


class QwenImageBaseLoop(DiffusionLoop[ConfigT, BucketT]):
    """Draws from a policy's hidden states and source pictures, each of which is encoded once."""

    def __init__(self, config: ConfigT, parts: EditorParts, max_pictures: int) -> None:
        """`max_pictures`: sources of a job, at most."""
        super().__init__(config, parts, PATCH_PX)
        self._max_pictures = max_pictures
        self._kept: LRUCache[tuple[bytes, Size], torch.Tensor] = LRUCache(NUM_KEPT_SOURCES)

    def _place(self, job: RenderJob) -> BucketT | RenderFailure:
        """Raises ValueError where the policy does not fit this renderer: no negative states under
        guidance, for example."""
        payload: HiddenStates = job.payload
        if self.config.true_cfg_scale > 1 and payload.negative_embeds is None:
            raise ValueError(
                "true_cfg_scale > 1 needs negative_embeds from the policy; set true_cfg_scale: 1 "
                "or use a policy that encodes the renderer's negative prompt"
            )
        if (number := len(job.sample.sources)) > self._max_pictures:
            return RenderFailure(
                f"too_many_sources: {number}, and this renderer reads at most {self._max_pictures}"
            )
        bucket = self.bucket_of(job)
        needed, of_pictures, room = self._positions(job, bucket)
        if needed <= room:
            return bucket
        if of_pictures > room:
            return RenderFailure(
                f"sources_too_long: {of_pictures} positions of pictures, room for {room}; show "
                "fewer, smaller or less elongated ones"
            )
        reason = f"too_long: {needed} positions of text and pictures, room for {room}"
        return RenderFailure(reason, blame="policy")

    @abstractmethod
    def bucket_of(self, job: RenderJob) -> BucketT:
        """What jobs must agree on to share a batch."""

    @abstractmethod
    def _positions(self, job: RenderJob, bucket: BucketT) -> tuple[int, int, int]:
        """Positions that the job needs, those that its pictures need alone, and the positions that
        the transformer has."""

    @abstractmethod
    def _encode(self, pictures: list[Image], size: Size) -> torch.Tensor:
        """Pictures, resized to `size` -> VAE latents [B, tokens, channels]."""

    def _source_latents(self, pictures_B: Sequence[Image], size: Size) -> torch.Tensor:
        """[B, tokens, channels]; pictures not met lately are encoded together."""
        keys_B = [(digest(picture), size) for picture in pictures_B]
        found = {key: self._kept[key] for key in keys_B if key in self._kept}
        new = {k: p for k, p in zip(keys_B, pictures_B, strict=True) if k not in found}
        if new:
            latents = self._encode(list(new.values()), size)
            found |= zip(new, latents.split(1), strict=True)
        self._kept.update((key, found[key]) for key in keys_B)
        return torch.cat([found[key] for key in keys_B])

    def _prepared_scheduler(self, num_tokens: int) -> Any:
        """For a picture of `num_tokens`; noise levels are uniform where none are given."""
        parts, steps = self.parts, self.config.num_steps
        uniform = np.linspace(1.0, 1 / steps, steps)
        sigmas = uniform if parts.sigmas is None else np.array(parts.sigmas)
        return prepared(parts.scheduler, num_tokens, parts.transformer.device, sigmas=sigmas)
