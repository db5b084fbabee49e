"""The Qwen-Image-Edit render loop: hidden states and source pictures in, edited pictures out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL.Image import Image

from rl.api.types import HiddenStates, RenderFailure, RenderJob
from rl.files import over_white
from rl.renderers.qwen_image.denoising_config import (
    PATCH_PX,
    DenoisingConfig,
    Size,
    fit_area,
    output_size,
)
from rl.renderers.qwen_image.modulation import ModulationTables, StepModulation
from rl.renderers.qwen_image.qwen_image_base_loop import QwenImageBaseLoop
from rl.renderers.qwen_image.qwen_image_components import EditorParts
from rl.renderers.qwen_image.qwen_image_denoiser import Conditioning, Denoiser
from rl.renderers.shared.decoding import in_slices, seeded_noise
from rl.renderers.shared.scheduling import denoise

NUM_ROTARY_ROWS = 4096
"""Rows of the transformer's rotary table: half the longer picture side plus the text must fit."""


@dataclass(frozen=True)
class Bucket:
    """The settings that jobs must share to be drawn in one batch."""

    output: Size
    """Size of the rendered picture."""
    conditions: tuple[Size, ...]
    """Size of each source as the VAE sees it."""


class QwenImageLoop(QwenImageBaseLoop[DenoisingConfig, Bucket]):
    """At stock settings equals `QwenImageEditPipeline` up to float rounding.

    The other jobs of a batch change a picture (range 0..1): in float32 by about 2e-6 with random
    weights, 3e-5 with a tiny trained model, 1e-4 with that model and guidance of 4; in bfloat16 by
    up to 2e-2 (5/255, tiny model), so only the same batch reproduces a bfloat16 picture exactly.
    """

    def __init__(self, config: DenoisingConfig, parts: EditorParts, max_pictures: int = 1) -> None:
        super().__init__(config, parts, max_pictures)
        self.state_dim = parts.transformer.config.joint_attention_dim
        self._denoiser = Denoiser(parts.transformer)
        self._modulation = ModulationTables(parts.transformer)

    @staticmethod
    def bucket_of(config: DenoisingConfig, job: RenderJob) -> Bucket | None:
        """The picture has the aspect of the last source. None: no source, so no picture."""
        if not (sources := job.sample.sources):
            return None
        return Bucket(
            output=output_size(config, sources[-1].size),
            conditions=tuple(fit_area(config.condition_area_px, s.size) for s in sources),
        )

    def _failure_of(self, job: RenderJob) -> RenderFailure | None:
        if not job.sample.sources:
            return RenderFailure("no_source: an editor needs a source picture")
        return super()._failure_of(job)

    def _positions(self, job: RenderJob, bucket: Bucket) -> tuple[int, int, int]:
        payload: HiddenStates = job.payload
        sides = [side for size in (bucket.output, *bucket.conditions) for side in size]
        limit = NUM_ROTARY_ROWS - max(sides) // (2 * PATCH_PX)
        return len(payload.embeds), payload.pictures[-1].stop if payload.pictures else 0, limit

    @torch.no_grad()
    def render_tensor(self, jobs: Sequence[RenderJob], bucket: Bucket) -> torch.Tensor:
        """Render jobs of one bucket: [B, 3, H, W], the renderer's dtype, -1..1."""
        transformer = self.parts.transformer
        width, height = (side // PATCH_PX for side in bucket.output)
        shape = (transformer.config.in_channels // 4, 2 * height, 2 * width)
        noise = pack(seeded_noise((job.noise_seed for job in jobs), shape))
        latents = noise.to(transformer.device, transformer.dtype)
        conditioning = self._conditioning(jobs, bucket)
        scheduler = self._prepared_scheduler(latents.shape[1])
        table = self._modulation.of_schedule(scheduler.timesteps)
        latents = denoise(
            latents,
            scheduler,
            lambda step, x: self._predict(x, conditioning, table[step].to(transformer.device)),
        )
        decode, picture_px = self.parts.vae.decode, bucket.output[0] * bucket.output[1]
        return in_slices(unpack(latents, height, width), decode, picture_px)

    def _predict(
        self, latents: torch.Tensor, conditioning: Conditioning, modulation: StepModulation
    ) -> torch.Tensor:
        """Velocity [B, tokens, channels]; under guidance one forward has all rows twice."""
        scale = self.config.true_cfg_scale
        if scale == 1:
            return self._denoiser.velocity(latents, conditioning, modulation)
        rows = self._denoiser.velocity(torch.cat([latents, latents]), conditioning, modulation)
        positive, negative = rows.chunk(2)
        return guide(positive, negative, scale)

    def _conditioning(self, jobs: Sequence[RenderJob], bucket: Bucket) -> Conditioning:
        """The inputs of all positive rows, followed by all negative rows under guidance."""
        payloads: list[HiddenStates] = [job.payload for job in jobs]
        states = [payload.embeds for payload in payloads]
        if self.config.true_cfg_scale > 1:
            states += [p.negative_embeds for p in payloads if p.negative_embeds is not None]
        pictures_by_position = zip(*(job.sample.sources for job in jobs), strict=True)
        sources = torch.cat(
            [
                self._source_latents(pictures_B, size)
                for pictures_B, size in zip(pictures_by_position, bucket.conditions, strict=True)
            ],
            dim=1,
        )
        shapes = [
            (1, height // PATCH_PX, width // PATCH_PX)
            for width, height in (bucket.output, *bucket.conditions)
        ]
        sources = sources.repeat(len(states) // len(jobs), 1, 1)
        return self._denoiser.prepare(states, sources, shapes)

    def _encode(self, picture: Image, size: Size) -> torch.Tensor:
        width, height = size
        pixels = self._pixels.preprocess(over_white(picture), height, width)
        return pack(self.parts.vae.encode(pixels))


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[B, C, 2h, 2w] -> [B, h * w, 4C]: 2x2 latents become one token."""
    batch, channels, height, width = latents.shape
    latents = latents.view(batch, channels, height // 2, 2, width // 2, 2)
    return latents.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * 4)


def unpack(latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """[B, height * width, 4C] -> [B, C, 2 * height, 2 * width]."""
    batch, _, channels = latents.shape
    latents = latents.view(batch, height, width, channels // 4, 2, 2)
    return latents.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, 2 * height, 2 * width)


def guide(positive: torch.Tensor, negative: torch.Tensor, scale: float) -> torch.Tensor:
    """Classifier-free guidance (Ho & Salimans 2022, eq. 6) with the editor's own norm rescale.

    `negative + scale * (positive - negative)`, each token then brought back to the norm of its
    positive prediction. All [B, tokens, channels].
    """
    combined = negative + scale * (positive - negative)
    return combined * (
        torch.norm(positive, dim=-1, keepdim=True) / torch.norm(combined, dim=-1, keepdim=True)
    )
