"""Base class of the Qwen-Image render loops: source latents, position limit, noise schedule."""

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
"""Source latents cached between batches and calls (0.5 MB each at 1024^2 in bfloat16)."""

ConfigT = TypeVar("ConfigT", bound=DenoisingConfig)
BucketT = TypeVar("BucketT", bound=Hashable)


class QwenImageBaseLoop(DiffusionLoop[ConfigT, BucketT]):
    """Draws from a policy's hidden states and source pictures, each of which is encoded once."""

    def __init__(self, config: ConfigT, parts: EditorParts, max_pictures: int) -> None:
        """`max_pictures`: most source pictures of a job."""
        super().__init__(config, parts, PATCH_PX)
        self._max_pictures = max_pictures
        self._cache: LRUCache[tuple[bytes, Size], torch.Tensor] = LRUCache(NUM_KEPT_SOURCES)

    def _bucket_or_failure(self, job: RenderJob) -> BucketT | RenderFailure:
        """Raises ValueError if the policy does not suit this renderer, e.g. if it gives no negative
        states under guidance."""
        payload: HiddenStates = job.payload
        if self.config.true_cfg_scale > 1 and payload.negative_embeds is None:
            raise ValueError(
                "true_cfg_scale > 1 needs negative_embeds from the policy; set true_cfg_scale: 1 "
                "or use a policy that encodes the renderer's negative prompt"
            )
        if (num_sources := len(job.sample.sources)) > self._max_pictures:
            return RenderFailure(
                f"too_many_sources: {num_sources}; this renderer reads at most {self._max_pictures}"
            )
        bucket = self.bucket_of(job)
        needed, by_pictures, limit = self._positions(job, bucket)
        if needed <= limit:
            return bucket
        if by_pictures > limit:
            return RenderFailure(
                f"sources_too_long: {by_pictures} positions of pictures, room for {limit}; "
                "use fewer, smaller or less elongated ones"
            )
        reason = f"too_long: {needed} positions of text and pictures, room for {limit}"
        return RenderFailure(reason, blame="policy")

    @abstractmethod
    def bucket_of(self, job: RenderJob) -> BucketT:
        """The settings that jobs must share to be drawn in one batch."""

    @abstractmethod
    def _positions(self, job: RenderJob, bucket: BucketT) -> tuple[int, int, int]:
        """Numbers of rotary positions: all that the job needs, those that its pictures need without
        its text, and those that the transformer has."""

    @abstractmethod
    def _encode(self, pictures: list[Image], size: Size) -> torch.Tensor:
        """Pictures, resized to `size` -> VAE latents [B, tokens, channels]."""

    def _source_latents(self, pictures_B: Sequence[Image], size: Size) -> torch.Tensor:
        """[B, tokens, channels]; encodes the pictures that are not cached, in one batch."""
        keys_B = [(digest(picture), size) for picture in pictures_B]
        latents_of = {key: self._cache[key] for key in keys_B if key in self._cache}
        uncached = {k: p for k, p in zip(keys_B, pictures_B, strict=True) if k not in latents_of}
        if uncached:
            latents = self._encode(list(uncached.values()), size)
            latents_of |= zip(uncached, latents.split(1), strict=True)
        self._cache.update((key, latents_of[key]) for key in keys_B)
        return torch.cat([latents_of[key] for key in keys_B])

    def _prepared_scheduler(self, num_tokens: int) -> Any:
        """The schedule for a picture of `num_tokens`; uniform noise levels if `parts` has none."""
        parts, steps = self.parts, self.config.num_steps
        uniform = np.linspace(1.0, 1 / steps, steps)
        sigmas = uniform if parts.sigmas is None else np.array(parts.sigmas)
        return prepared(parts.scheduler, num_tokens, parts.transformer.device, sigmas=sigmas)
