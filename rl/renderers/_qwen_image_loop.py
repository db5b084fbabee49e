"""The Qwen-Image-Edit render loop: hidden states and source pictures in, edited pictures out.

What: loads transformer, VAE and scheduler (no text encoder) and denoises in batches; at stock
settings it equals `QwenImageEditPipeline` bit for bit. What not: the pipelines' `__call__` and
`encode_prompt` are never used: the first resizes every source to 1024^2 and squashes mixed aspects,
the second drops M-RoPE. Imports torch, so the plugs import this inside `build`.

Determinism: a picture depends on its job alone. Batch mates and padding move it by float rounding
only: <= 2e-6 of the 0..1 range in float32. In bfloat16 that is up to 2e-2 (5/255, tiny size), so
there a picture repeats exactly only in the same batch.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from rl.renderers._batches import render_or_halve
from rl.renderers._decoding import decode_in_slices, to_pictures
from rl.renderers._qwen_image import PATCH_PX, QwenImageConfig, fit_area, output_size
from rl.renderers._scheduling import override_scheduler, resolution_shift
from rl.system.wheels import mend_mismatched_wheels
from rl.types import HiddenStates, RenderFailure, RenderJob, Sample

NUM_KEPT_SOURCES = 64
"""Source latents kept between batches and calls (0.5 MB each at 1024^2 in bfloat16)."""

NUM_ROTARY_ROWS = 4096
"""Rows of the transformer's rotary table: half the longer picture side plus the text must fit."""

Size = tuple[int, int]
"""(width, height), px."""


@dataclass(frozen=True)
class EditorParts:
    """The frozen modules, in evaluation mode, on one device and in one dtype."""

    transformer: Any
    """QwenImageTransformer2DModel."""
    vae: Any
    """AutoencoderKLQwenImage."""
    scheduler: Any
    """FlowMatchEulerDiscreteScheduler; stateful, so every batch runs on a copy."""


@dataclass(frozen=True)
class Bucket:
    """What jobs must agree on to share a batch."""

    output: Size
    """Of the rendered picture."""
    condition: Size
    """Of the source as the VAE sees it."""


def load_parts(config: QwenImageConfig, device: str) -> EditorParts:
    """Load transformer, VAE and scheduler from a hub id or folder; fuse the adapter, if any."""
    mend_mismatched_wheels()
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImageTransformer2DModel,
    )

    origin = {
        "pretrained_model_name_or_path": config.model_path,
        "revision": config.revision,
    }
    weights = {
        "torch_dtype": getattr(torch, config.dtype),
        "use_safetensors": True,
        # Straight to the device: eight ranks would otherwise hold eight copies in host memory.
        "device_map": {"": device},
    }
    transformer = QwenImageTransformer2DModel.from_pretrained(
        subfolder="transformer", **origin, **weights
    )
    vae = AutoencoderKLQwenImage.from_pretrained(subfolder="vae", **origin, **weights)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(subfolder="scheduler", **origin)
    if config.lora_path:
        _fuse_adapter(transformer, config.lora_path, config.lora_weight_name)
    return EditorParts(
        transformer=transformer.eval().requires_grad_(False),
        vae=vae.eval().requires_grad_(False),
        scheduler=override_scheduler(scheduler, config.scheduler_overrides),
    )


def _fuse_adapter(transformer: Any, lora_path: str, weight_name: str | None) -> None:
    from diffusers.loaders import QwenImageLoraLoaderMixin

    # The metadata holds alpha; without it peft assumes alpha = rank and the strength is wrong.
    state_dict, metadata = QwenImageLoraLoaderMixin.lora_state_dict(
        lora_path, weight_name=weight_name, use_safetensors=True, return_lora_metadata=True
    )
    QwenImageLoraLoaderMixin.load_lora_into_transformer(state_dict, transformer, metadata=metadata)
    transformer.fuse_lora()
    transformer.unload_lora()


class QwenImageRenderer:
    """The renderer of the Qwen-Image-Edit plugs; see `rl.contracts.Renderer`."""

    def __init__(self, config: QwenImageConfig, parts: EditorParts) -> None:
        from diffusers.image_processor import VaeImageProcessor

        self.config = config
        self.parts = parts
        self.state_dim = parts.transformer.config.joint_attention_dim
        self._pixels = VaeImageProcessor(vae_scale_factor=PATCH_PX)
        self._source_latents: OrderedDict[tuple[int, Size], tuple[Image.Image, torch.Tensor]]
        self._source_latents = OrderedDict()

    def illustrate(self, samples: Sequence[Sample]) -> list[Sample]:
        """As they are: an editor's samples come with their pictures."""
        return list(samples)

    def take_stats(self) -> dict[str, float]:
        """Nothing to report."""
        return {}

    def render(
        self, jobs: Sequence[RenderJob]
    ) -> Iterator[tuple[int, Image.Image | RenderFailure]]:
        """Yield `(index into jobs, picture or failure)`, batch by batch.

        Pictures are RGB. A failing batch fails its own jobs only; one that does not fit in memory
        is halved until it does. Raises ValueError when guidance is on and a payload has no
        negative states: that is a policy that does not fit this renderer, not a bad sample.
        """
        buckets: dict[Bucket, list[int]] = {}
        for index, job in enumerate(jobs):
            if job.sample.source is None:
                yield index, RenderFailure("no_source: an editor needs a source picture")
                continue
            bucket = self.bucket_of(job.sample.source)
            failure = self._refuse(job.payload, bucket)
            if failure is None:
                buckets.setdefault(bucket, []).append(index)
            else:
                yield index, failure
        for bucket, members in buckets.items():
            for start in range(0, len(members), self.config.batch_size):
                indices = members[start : start + self.config.batch_size]
                render = functools.partial(self._render_batch, bucket=bucket)
                outcomes = render_or_halve(render, [jobs[i] for i in indices])
                yield from zip(indices, outcomes, strict=True)

    def _refuse(self, payload: HiddenStates, bucket: Bucket) -> RenderFailure | None:
        if self.config.true_cfg_scale > 1 and payload.negative_embeds is None:
            raise ValueError(
                "true_cfg_scale > 1 needs negative_embeds from the policy; set true_cfg_scale: 1 "
                "or use a policy that encodes the renderer's negative prompt"
            )
        room = NUM_ROTARY_ROWS - max(*bucket.output, *bucket.condition) // (2 * PATCH_PX)
        if len(payload.embeds) <= room:
            return None
        reason = f"too_long: {len(payload.embeds)} conditioning tokens, room for {room}"
        return RenderFailure(reason, blame="policy")

    def bucket_of(self, source: Image.Image) -> Bucket:
        """Sizes of the picture made from `source`, and of `source` as the VAE sees it."""
        return Bucket(
            output=output_size(self.config, source.size),
            condition=fit_area(self.config.condition_area_px, source.size),
        )

    def _render_batch(
        self, jobs: Sequence[RenderJob], bucket: Bucket
    ) -> list[Image.Image | RenderFailure]:
        return to_pictures(self.render_tensor(jobs, bucket), self._pixels)

    @torch.no_grad()
    def render_tensor(self, jobs: Sequence[RenderJob], bucket: Bucket) -> torch.Tensor:
        """Render jobs of one bucket: [B, 3, H, W], the renderer's dtype, nominally -1..1."""
        transformer = self.parts.transformer
        width, height = (side // PATCH_PX for side in bucket.output)
        condition_width, condition_height = (side // PATCH_PX for side in bucket.condition)
        noise = [
            make_noise(job.noise_seed, transformer.config.in_channels // 4, height, width)
            for job in jobs
        ]
        latents = torch.cat(noise).to(transformer.device, transformer.dtype)
        pictures = [job.sample.source for job in jobs if job.sample.source is not None]
        assert len(pictures) == len(jobs), "`render` gives no bucket to a job without a source"
        sources = torch.cat([self._encode_source(picture, bucket) for picture in pictures])
        shapes = [(1, height, width), (1, condition_height, condition_width)]
        conditionings = self._conditionings([job.payload for job in jobs])
        scheduler = copy.deepcopy(self.parts.scheduler)
        set_timesteps(scheduler, self.config.num_steps, latents.shape[1], transformer.device)
        for timestep in scheduler.timesteps:
            velocity = self._predict(latents, sources, conditionings, timestep, shapes)
            latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        return self._decode(unpack(latents, height, width))

    def _predict(
        self,
        latents: torch.Tensor,
        sources: torch.Tensor,
        conditionings: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        timestep: torch.Tensor,
        shapes: list[tuple[int, int, int]],
    ) -> torch.Tensor:
        """Velocity [B, tokens, channels]; `conditionings` holds positive (and negative) states,
        or both stacked over the batch."""
        outputs = []
        for embeds, mask in conditionings:
            repeats = len(embeds) // len(latents)
            rows = torch.cat([latents, sources], dim=1).repeat(repeats, 1, 1)
            output = self.parts.transformer(
                hidden_states=rows,
                # Stock rounds the timestep to the latents' dtype before dividing.
                timestep=timestep.expand(len(rows)).to(latents.dtype) / 1000,
                encoder_hidden_states=embeds,
                encoder_hidden_states_mask=mask,
                img_shapes=[shapes] * len(rows),
                return_dict=False,
            )[0]
            outputs.extend(output[:, : latents.shape[1]].chunk(repeats))
        if len(outputs) == 1:
            return outputs[0]
        positive, negative = outputs
        return guide(positive, negative, self.config.true_cfg_scale)

    def _conditionings(
        self, payloads_B: Sequence[HiddenStates]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """(states, mask) per forward of a step: one of B rows, one of 2B, or two of B."""
        rows = [[payload.embeds for payload in payloads_B]]
        if self.config.true_cfg_scale > 1:
            negatives = [payload.negative_embeds for payload in payloads_B]
            rows.append([states for states in negatives if states is not None])
            assert len(rows[1]) == len(rows[0]), "`_refuse` lets no payload without them pass"
            if self.config.cfg_in_one_forward:
                rows = [rows[0] + rows[1]]
        like = self.parts.transformer
        return [pad_right([e.to(like.device, like.dtype) for e in embeds]) for embeds in rows]

    def _encode_source(self, source: Image.Image, bucket: Bucket) -> torch.Tensor:
        """Packed VAE latents [1, tokens, channels] of a source, encoded once per picture object."""
        key = (id(source), bucket.condition)
        if key in self._source_latents:
            self._source_latents.move_to_end(key)
            return self._source_latents[key][1]
        vae = self.parts.vae
        width, height = bucket.condition
        pixels = self._pixels.preprocess(source.convert("RGB"), height, width)
        encoded = vae.encode(pixels.unsqueeze(2).to(vae.device, vae.dtype)).latent_dist.mode()
        mean, std = self._latent_statistics(encoded)
        packed = pack((encoded - mean) / std)
        # The picture is kept beside its latents: a freed one's id could come back as another's.
        self._source_latents[key] = (source, packed)
        if len(self._source_latents) > NUM_KEPT_SOURCES:
            self._source_latents.popitem(last=False)
        return packed

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        vae = self.parts.vae
        latents = latents.to(vae.dtype)
        mean, std = self._latent_statistics(latents)
        # Dividing by the reciprocal rounds as stock does; multiplying by std would not.
        latents = latents / (1.0 / std) + mean
        return decode_in_slices(latents, lambda z: vae.decode(z, return_dict=False)[0][:, :, 0])

    def _latent_statistics(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.parts.vae.config
        mean, std = (
            torch.tensor(s).view(1, -1, 1, 1, 1).to(like)
            for s in (config.latents_mean, config.latents_std)
        )
        return mean, std


def make_noise(seed: int, num_channels: int, height: int, width: int) -> torch.Tensor:
    """Packed standard-normal noise [1, height * width, 4 * channels], float32 on the CPU.

    Drawn alike whatever the device, the dtype and the batch; sizes are in 16 px patches.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = (1, num_channels, 1, 2 * height, 2 * width)
    return pack(torch.randn(shape, generator=generator, dtype=torch.float32))


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[B, C, 1, 2h, 2w] -> [B, h * w, 4C]: 2x2 latents become one token."""
    batch, channels, _, height, width = latents.shape
    latents = latents.view(batch, channels, height // 2, 2, width // 2, 2)
    return latents.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * 4)


def unpack(latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """[B, height * width, 4C] -> [B, C, 1, 2 * height, 2 * width]."""
    batch, _, channels = latents.shape
    latents = latents.view(batch, height, width, channels // 4, 2, 2)
    return latents.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, 1, 2 * height, 2 * width)


def pad_right(embeds_B: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [L_b, D] -> zero-padded [B, L, D] and mask [B, L] bool, None where nothing is padded.

    On the right: text rotary positions count from the left edge, padding included.
    """
    lengths = torch.tensor([len(embeds) for embeds in embeds_B])
    padded = torch.nn.utils.rnn.pad_sequence(list(embeds_B), batch_first=True)
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    return padded, None if mask.all() else mask.to(padded.device)


def guide(positive: torch.Tensor, negative: torch.Tensor, scale: float) -> torch.Tensor:
    """Classifier-free guidance (Ho & Salimans 2022, eq. 6) with the editor's own norm rescale.

    `negative + scale * (positive - negative)`, each token then brought back to the norm of its
    positive prediction. All [B, tokens, channels].
    """
    combined = negative + scale * (positive - negative)
    return combined * (
        torch.norm(positive, dim=-1, keepdim=True) / torch.norm(combined, dim=-1, keepdim=True)
    )


def set_timesteps(scheduler: Any, num_steps: int, num_tokens: int, device: Any) -> None:
    """Prepare a scheduler: uniform sigmas, shifted by the picture's own token count; condition
    tokens do not count."""
    sigmas = np.linspace(1.0, 1 / num_steps, num_steps)
    shift = resolution_shift(scheduler, num_tokens)
    scheduler.set_timesteps(sigmas=sigmas, device=device, mu=shift)
    scheduler.set_begin_index(0)
