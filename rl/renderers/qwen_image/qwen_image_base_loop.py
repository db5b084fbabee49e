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
from rl.files import digest
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

    def _failure_of(self, job: RenderJob) -> RenderFailure | None:
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
        bucket = self.bucket_of(self.config, job)
        needed, by_pictures, limit = self._positions(job, bucket)
        if needed <= limit:
            return None
        if by_pictures > limit:
            return RenderFailure(
                f"sources_too_long: {by_pictures} positions of pictures, room for {limit}; "
                "use fewer, smaller or less elongated ones"
            )
        reason = f"too_long: {needed} positions of text and pictures, room for {limit}"
        return RenderFailure(reason, blame="policy")

    @abstractmethod
    def _positions(self, job: RenderJob, bucket: BucketT) -> tuple[int, int, int]:
        """Numbers of rotary positions: all that the job needs, those that its pictures need without
        its text, and those that the transformer has."""

    @abstractmethod
    def _encode(self, picture: Image, size: Size) -> torch.Tensor:
        """A picture, resized to `size` -> VAE latents [1, tokens, channels]."""

    def _source_latents(self, pictures_B: Sequence[Image], size: Size) -> torch.Tensor:
        """[B, tokens, channels]. Each picture is encoded alone and once while it is kept, so its
        latents depend neither on the batch nor on what was drawn before."""
        latents_B = []
        for picture in pictures_B:
            key = (digest(picture), size)
            if key not in self._cache:
                self._cache[key] = self._encode(picture, size)
            latents_B.append(self._cache[key])
        return torch.cat(latents_B)

    def _prepared_scheduler(self, num_tokens: int) -> Any:
        """The schedule for a picture of `num_tokens`; uniform noise levels if `parts` has none."""
        parts, steps = self.parts, self.config.num_steps
        uniform = np.linspace(1.0, 1 / steps, steps)
        sigmas = uniform if parts.sigmas is None else np.array(parts.sigmas)
        return prepared(parts.scheduler, num_tokens, parts.transformer.device, sigmas=sigmas)
