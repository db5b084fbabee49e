"""The Qwen-Image-Edit render loop: hidden states and source pictures in, edited pictures out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from PIL import Image

from rl.api.types import HiddenStates, RenderFailure, RenderJob
from rl.files.images import over_white
from rl.renderers.qwen_image.attention import attention_of
from rl.renderers.qwen_image.denoising import denoise, prepared
from rl.renderers.qwen_image.denoising_config import (
    PATCH_PX,
    QwenImageConfig,
    fit_area,
    output_size,
)
from rl.renderers.qwen_image.modulation import ModulationTables, StepModulation
from rl.renderers.qwen_image.qwen_image_components import EditorParts
from rl.renderers.qwen_image.qwen_image_denoiser import Conditioning, Denoiser
from rl.renderers.qwen_image.sources import Size, SourceLatents
from rl.renderers.shared.batches import Fits, render_in_batches
from rl.renderers.shared.decoding import decode_in_slices, in_slices, seeded_noise, to_pictures

NUM_ROTARY_ROWS = 4096
"""Rows of the transformer's rotary table: half the longer picture side plus the text must fit."""


@dataclass(frozen=True)
class Bucket:
    """What jobs must agree on to share a batch."""

    output: Size
    """Size of the rendered picture."""
    conditions: tuple[Size, ...]
    """Size of each source as the VAE sees it."""


class QwenImageLoop:
    """At stock settings equals `QwenImageEditPipeline` up to float rounding.

    A picture depends on its job alone: batch mates move it by float rounding, in float32 about 2e-6
    of the 0..1 range with random weights, 3e-5 with trained ones of tiny size, 1e-4 there under
    guidance of 4. In bfloat16 it is up to 2e-2 (5/255, tiny size), so there a picture repeats
    exactly only in the same batch.
    """

    def __init__(self, config: QwenImageConfig, parts: EditorParts, max_pictures: int = 1) -> None:
        """`max_pictures`: sources of a job, at most."""
        from diffusers.image_processor import VaeImageProcessor

        self.config = config
        self.parts = parts
        self._max_pictures = max_pictures
        self.state_dim = parts.transformer.config.joint_attention_dim
        self._denoiser = Denoiser(
            parts.transformer,
            attention_of(config.attention_backend, parts.transformer.device),
            compiled=config.compile_blocks,
        )
        self._modulation = ModulationTables(parts.transformer)
        self._pixels = VaeImageProcessor(vae_scale_factor=PATCH_PX)
        self._sources = SourceLatents(self._encode)
        self._fits: Fits = {}

    def render(
        self, jobs: Iterable[RenderJob]
    ) -> Iterator[tuple[int, Image.Image | RenderFailure]]:
        """Yield `(number of the job, picture or failure)`, batch by batch, as batches fill.

        Pictures are RGB. A failing batch fails its own jobs only; one that does not fit in memory
        is halved until it does. Raises ValueError when guidance is on and a payload has no
        negative states: that is a policy that does not fit this renderer, not a bad sample.
        """
        return render_in_batches(
            jobs,
            self._place,
            size_of=lambda bucket: self.config.batch_size,
            render=lambda batch, bucket: to_pictures(
                self.render_tensor(batch, bucket), self._pixels
            ),
            fits=self._fits,
        )

    def _place(self, job: RenderJob) -> Bucket | RenderFailure:
        """Where a job waits for its batch, or why it never will."""
        payload: HiddenStates = job.payload
        sources = job.sample.sources
        if not sources:
            return RenderFailure("no_source: an editor needs a source picture")
        if len(sources) > self._max_pictures:
            return RenderFailure(
                f"too_many_sources: {len(sources)}, of which this editor reads {self._max_pictures}"
            )
        if self.config.true_cfg_scale > 1 and payload.negative_embeds is None:
            raise ValueError(
                "true_cfg_scale > 1 needs negative_embeds from the policy; set true_cfg_scale: 1 "
                "or use a policy that encodes the renderer's negative prompt"
            )
        bucket = self.bucket_of(sources)
        sides = [side for size in (bucket.output, *bucket.conditions) for side in size]
        room = NUM_ROTARY_ROWS - max(sides) // (2 * PATCH_PX)
        if len(payload.embeds) <= room:
            return bucket
        shown = payload.pictures[-1].stop if payload.pictures else 0
        if shown > room:
            return RenderFailure(
                f"sources_too_long: {shown} conditioning tokens of pictures, room for {room}; show "
                "fewer, or lower renderer.policy_image_area_px"
            )
        reason = f"too_long: {len(payload.embeds)} conditioning tokens, room for {room}"
        return RenderFailure(reason, blame="policy")

    def bucket_of(self, sources: Sequence[Image.Image]) -> Bucket:
        """Sizes of the picture made from `sources`, in the aspect of the last one, and of each of
        them as the VAE sees it."""
        area_px = self.config.condition_area_px
        return Bucket(
            output=output_size(self.config, sources[-1].size),
            conditions=tuple(fit_area(area_px, source.size) for source in sources),
        )

    @torch.no_grad()
    def render_tensor(self, jobs: Sequence[RenderJob], bucket: Bucket) -> torch.Tensor:
        """Render jobs of one bucket: [B, 3, H, W], the renderer's dtype, -1..1."""
        transformer = self.parts.transformer
        width, height = (side // PATCH_PX for side in bucket.output)
        shape = (transformer.config.in_channels // 4, 2 * height, 2 * width)
        noise = pack(seeded_noise((job.noise_seed for job in jobs), shape))
        latents = noise.to(transformer.device, transformer.dtype)
        conditionings = self._conditionings(jobs, bucket)
        scheduler = prepared(
            self.parts.scheduler, self.config.num_steps, latents.shape[1], transformer.device
        )
        table = self._modulation.of_schedule(scheduler.timesteps)
        latents = denoise(
            latents,
            scheduler,
            lambda step, x: self._predict(x, conditionings, table[step].to(transformer.device)),
            self.config.step_cache_interval,
        )
        return decode_in_slices(unpack(latents, height, width), self.parts.vae.decode)

    def _predict(
        self,
        latents: torch.Tensor,
        conditionings: Sequence[Conditioning],
        modulation: StepModulation,
    ) -> torch.Tensor:
        """Velocity [B, tokens, channels], guided if there are negative rows."""
        outputs: list[torch.Tensor] = []
        for given in conditionings:
            repeats = len(given.num_words) // len(latents)
            rows = latents.repeat(repeats, 1, 1)
            outputs.extend(self._denoiser.velocity(rows, given, modulation).chunk(repeats))
        if len(outputs) == 1:
            return outputs[0]
        positive, negative = outputs
        return guide(positive, negative, self.config.true_cfg_scale)

    def _conditionings(self, jobs: Sequence[RenderJob], bucket: Bucket) -> list[Conditioning]:
        """One per forward of a step: of B rows, of 2B (positive, then negative), or two of B."""
        payloads: list[HiddenStates] = [job.payload for job in jobs]
        forwards = [[payload.embeds for payload in payloads]]
        if self.config.true_cfg_scale > 1:
            negatives = [payload.negative_embeds for payload in payloads]
            forwards.append([states for states in negatives if states is not None])
            assert len(forwards[1]) == len(jobs), "`_place` lets no payload without them pass"
            if self.config.cfg_in_one_forward:
                forwards = [forwards[0] + forwards[1]]
        pictures_of_each = zip(*(job.sample.sources for job in jobs), strict=True)
        sources = torch.cat(
            [
                self._sources.of(pictures_B, size)
                for pictures_B, size in zip(pictures_of_each, bucket.conditions, strict=True)
            ],
            dim=1,
        )
        shapes = [
            (1, height // PATCH_PX, width // PATCH_PX)
            for width, height in (bucket.output, *bucket.conditions)
        ]
        return [
            self._denoiser.prepare(rows, sources.repeat(len(rows) // len(jobs), 1, 1), shapes)
            for rows in forwards
        ]

    def _encode(self, pictures: list[Image.Image], size: Size) -> torch.Tensor:
        """Packed VAE latents [B, tokens, channels]."""
        width, height = size
        pixels = self._pixels.preprocess([over_white(p) for p in pictures], height, width)
        return pack(in_slices(pixels, self.parts.vae.encode, width * height))


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
