"""The render loop of the Qwen-Image editors, with their VAE."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from cachetools import LRUCache, cachedmethod
from diffusers.models.autoencoders import autoencoder_kl_qwenimage as stock
from diffusers.models.autoencoders import autoencoder_kl_qwenimage21 as stock_21
from PIL.Image import Image
from torch import nn

from rl.api.types import HiddenStates, RenderFailure, RenderJob
from rl.files import digest, over_white
from rl.model_files import align_weights
from rl.renderers.diffusion_loop import DiffusionLoop, in_slices, seeded_noise
from rl.renderers.diffusion_renderer import denoise, override_scheduler, prepared
from rl.renderers.qwen_image_config import PATCH_PX, Bucket, DenoisingConfig, Size, edit_bucket
from rl.renderers.qwen_image_denoiser import Conditioning, Denoiser, ModulationTables, move

# ---- vae2d ---------------------------------------------------------------------------------------
# The Qwen-Image VAEs for single pictures, without the parts that only videos need.


class FrameConv(nn.Conv2d):
    """A causal 3-D convolution for a single frame: [B, C, 1, H, W] -> [B, C', 1, H', W']"""

    def __init__(self, conv: Any) -> None:
        left, _, top, *_ = conv._padding
        super().__init__(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size[1:],
            stride=conv.stride[1:],
            padding=(top, left),
            device="meta",
        )
        self.weight = nn.Parameter(conv.weight[:, :, -1].contiguous(), requires_grad=False)
        self.bias = conv.bias

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        return super().forward(frames.squeeze(2)).unsqueeze(2)


class FrameVae(nn.Module):
    """Pictures to normalised latents and back. Replaces the convolutions of the `vae` passed to it.

    A causal kernel multiplies a single frame by its last time step only; the earlier ones meet
    zero padding. Equals the stock VAE up to rounding (1e-6 relative in float32), with a third of
    its FLOPs.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, vae: Any) -> None:
        super().__init__()
        for name, layer in list(vae.named_modules()):
            if isinstance(layer, stock.QwenImageCausalConv3d):
                vae.set_submodule(name, FrameConv(layer))
        self.encoder = vae.encoder
        self.quant_conv = vae.quant_conv
        self.post_quant_conv = vae.post_quant_conv
        self.decoder = vae.decoder
        for name in ("mean", "std"):
            channels = getattr(vae.config, f"latents_{name}")
            statistic = torch.tensor(channels).view(1, -1, 1, 1).to(vae.device, vae.dtype)
            self.register_buffer(name, statistic)
        # The memory layout that convolutions prefer, on CPU and GPU: encoding takes half the time.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] in -1..1 -> the posterior's mode [B, C, H / 8, W / 8], normalised to mean 0
        and standard deviation 1 over the checkpoint's training pictures."""
        pixels = pixels.to(self.mean.device, self.mean.dtype).unsqueeze(2)
        moments = self.quant_conv(self.encoder(pixels)).squeeze(2)
        mode: torch.Tensor = moments.chunk(2, dim=1)[0]
        return (mode - self.mean) / self.std

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalised [B, C, h, w] -> [B, 3, 8h, 8w] in -1..1."""
        # Dividing by the reciprocal rounds as the stock pipeline does; multiplying would not.
        latents = latents.to(self.std.dtype) / (1.0 / self.std) + self.mean
        frames: torch.Tensor = self.decoder(self.post_quant_conv(latents.unsqueeze(2)))
        return frames.squeeze(2).clamp(-1.0, 1.0)


class PictureVae(FrameVae):
    """Qwen-Image-2.1's VAE: RGBA pictures to normalised latents and back, one latent per 16x16 px.
    Called without the caches for later frames, which would hold all features in memory."""

    def __init__(self, vae: Any) -> None:
        patch = vae.config.patch_size or 1
        self._fold = partial(stock_21._patchify, patch_size=patch)
        self._unfold = partial(stock_21._unpatchify, patch_size=patch)
        super().__init__(vae)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """[B, 4, H, W] in -1..1 -> [B, C, H / 16, W / 16], normalised as in `FrameVae.encode`."""
        return super().encode(self._fold(pixels.unsqueeze(2)).squeeze(2))

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalised [B, C, h, w] -> [B, 4, 16h, 16w] in -1..1."""
        latents = latents.to(self.std.dtype) * self.std + self.mean
        frames: torch.Tensor = self.decoder(
            self.post_quant_conv(latents.unsqueeze(2)), first_chunk=True
        )
        return self._unfold(frames).squeeze(2).clamp(-1.0, 1.0)


# ---- qwen image components -----------------------------------------------------------------------
# Loads the modules of a Qwen-Image model, fuses the adapter, and moves them to the device.


@dataclass(frozen=True)
class EditorParts:
    """The frozen modules, in evaluation mode, on one device and in one dtype."""

    transformer: Any
    """diffusers' transformer; an editor's modulation weights stay in host memory."""
    vae: FrameVae
    scheduler: Any
    """FlowMatchEulerDiscreteScheduler; stateful, so every batch runs on a copy."""
    sigmas: Sequence[float] | None = None
    """Noise levels of the steps before the shift; None: uniform."""


def load_parts(config: DenoisingConfig, device: str) -> EditorParts:
    """Load an editor's modules from a hub id or folder."""
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

    return load_modules(config, device, QwenImageTransformer2DModel, AutoencoderKLQwenImage)


def load_modules(
    config: DenoisingConfig,
    device: str,
    transformer_class: Any,
    vae_class: Any,
    frame_vae: type[FrameVae] = FrameVae,
    sigmas: Sequence[float] | None = None,
) -> EditorParts:
    """Load transformer, VAE and scheduler; fuse the adapter, if any."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    origin = origin_of(config)
    weights = {
        "torch_dtype": getattr(torch, config.dtype),
        "use_safetensors": True,
        # Memory-maps the file: the ranks of a machine share its pages instead of copying it.
        "device_map": {"": "cpu"},
    }
    transformer = transformer_class.from_pretrained(subfolder="transformer", **origin, **weights)
    prepare_transformer(transformer, config, device)
    vae = vae_class.from_pretrained(subfolder="vae", **origin, **weights).to(device)
    align_weights(transformer, device)
    align_weights(vae, device)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(subfolder="scheduler", **origin)
    return EditorParts(
        transformer.eval().requires_grad_(False),
        frame_vae(vae).eval().requires_grad_(False),
        override_scheduler(scheduler, config.scheduler_overrides),
        sigmas,
    )


def origin_of(config: DenoisingConfig) -> dict[str, Any]:
    """The arguments of `from_pretrained` that name the checkpoint."""
    return {"pretrained_model_name_or_path": config.model_path, "revision": config.revision}


def prepare_transformer(transformer: Any, config: DenoisingConfig, device: str) -> None:
    """Fuse the adapter, round to 8 bits if `config.fp8` asks for it, and move the transformer.

    With `fp8` the unrounded weights need not fit on the device: the adapter is fused in host
    memory, and blocks are rounded one part at a time.
    """
    if config.fp8 == "off":
        move(transformer, device)
    if config.lora_path:
        from diffusers.loaders import QwenImageLoraLoaderMixin

        # A few-step adapter, for good. The metadata holds alpha; without it peft assumes alpha =
        # rank and the strength is wrong.
        state_dict, metadata = QwenImageLoraLoaderMixin.lora_state_dict(
            config.lora_path,
            weight_name=config.lora_weight_name,
            use_safetensors=True,
            return_lora_metadata=True,
        )
        QwenImageLoraLoaderMixin.load_lora_into_transformer(
            state_dict, transformer, metadata=metadata
        )
    if config.fp8 != "off":
        move(transformer, device, rounded=True)


# ---- qwen image base loop ------------------------------------------------------------------------
# Base class of the Qwen-Image render loops: source latents, position limit, noise schedule.

NUM_KEPT_SOURCES = 64
"""Source latents cached between batches and calls (0.5 MB each at 1024^2 in bfloat16)."""

ConfigT = TypeVar("ConfigT", bound=DenoisingConfig)
BucketT = TypeVar("BucketT", bound=Hashable)


class QwenImageBaseLoop(DiffusionLoop[ConfigT, BucketT]):
    """Draws from a policy's hidden states and source pictures, each of which is encoded once."""

    def __init__(self, config: ConfigT, parts: EditorParts) -> None:
        super().__init__(config, parts, PATCH_PX)
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
        num_sources, most = len(job.sample.sources), self.config.most_sources
        if num_sources > most:
            reason = f"too_many_sources: {num_sources}; this renderer reads at most {most}"
            return RenderFailure(reason)
        needed, limit = self._positions(job, self.bucket_of(self.config, job))
        if needed <= limit:
            return None
        reason = f"too_long: {needed} positions of text and pictures, room for {limit}"
        return RenderFailure(reason, blame="policy")

    @abstractmethod
    def _positions(self, job: RenderJob, bucket: BucketT) -> tuple[int, int]:
        """Numbers of rotary positions: those that the job needs, and those that the transformer
        has."""

    @abstractmethod
    def _encode(self, picture: Image, size: Size) -> torch.Tensor:
        """A picture, resized to `size` -> VAE latents [1, tokens, channels]."""

    @cachedmethod(lambda self: self._cache, lambda self, picture, size: (digest(picture), size))
    def _latents_of(self, picture: Image, size: Size) -> torch.Tensor:
        """[1, tokens, channels]. Each picture is encoded alone and once while it is kept, so its
        latents depend neither on the batch nor on what was drawn before."""
        return self._encode(picture, size)

    def _prepared_scheduler(self, num_tokens: int) -> Any:
        """The schedule for a picture of `num_tokens`; uniform noise levels if `parts` has none."""
        parts, steps = self.parts, self.config.num_steps
        uniform = np.linspace(1.0, 1 / steps, steps)
        sigmas = uniform if parts.sigmas is None else np.array(parts.sigmas)
        return prepared(parts.scheduler, num_tokens, parts.transformer.device, sigmas=sigmas)


# ---- qwen image loop -----------------------------------------------------------------------------
# The Qwen-Image-Edit render loop: hidden states and source pictures in, edited pictures out.

NUM_ROTARY_ROWS = 4096
"""Rows of the transformer's rotary table: half the longer picture side plus the text must fit."""


class QwenImageLoop(QwenImageBaseLoop[DenoisingConfig, Bucket]):
    """At stock settings equals `QwenImageEditPipeline` up to float rounding.

    The other jobs of a batch change a picture (range 0..1): in float32 by about 2e-6 with random
    weights, 3e-5 with a tiny trained model, 1e-4 with that model and guidance of 4; in bfloat16 by
    up to 2e-2 (5/255, tiny model), so only the same batch reproduces a bfloat16 picture exactly.
    """

    bucket_of = staticmethod(edit_bucket)

    def __init__(self, config: DenoisingConfig, parts: EditorParts) -> None:
        super().__init__(config, parts)
        self.state_dim = parts.transformer.config.joint_attention_dim
        self._denoiser = Denoiser(parts.transformer)
        self._modulation = ModulationTables(parts.transformer)

    def _failure_of(self, job: RenderJob) -> RenderFailure | None:
        if not job.sample.sources:
            return RenderFailure("no_source: an editor needs a source picture")
        return super()._failure_of(job)

    def _positions(self, job: RenderJob, bucket: Bucket) -> tuple[int, int]:
        sides = [side for size in (bucket.output, *bucket.conditions) for side in size]
        limit = NUM_ROTARY_ROWS - max(sides) // (2 * PATCH_PX)
        return len(job.payload.embeds), limit

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
        scale = self.config.true_cfg_scale

        def velocity(step: int, x: torch.Tensor) -> torch.Tensor:
            modulation = table[step].to(transformer.device)
            if scale == 1:
                return self._denoiser.velocity(x, conditioning, modulation)
            both = self._denoiser.velocity(torch.cat([x, x]), conditioning, modulation)
            positive, negative = both.chunk(2)
            return guide(positive, negative, scale)

        latents = denoise(latents, scheduler, velocity)
        decode, picture_px = self.parts.vae.decode, bucket.output[0] * bucket.output[1]
        return in_slices(unpack(latents, height, width), decode, picture_px)

    def _conditioning(self, jobs: Sequence[RenderJob], bucket: Bucket) -> Conditioning:
        """The inputs of all positive rows, followed by all negative rows under guidance."""
        payloads: list[HiddenStates] = [job.payload for job in jobs]
        states = [payload.embeds for payload in payloads]
        if self.config.true_cfg_scale > 1:
            states += [p.negative_embeds for p in payloads if p.negative_embeds is not None]
        pictures_by_position = zip(*(job.sample.sources for job in jobs), strict=True)
        sources = torch.cat(
            [
                torch.cat([self._latents_of(picture, size) for picture in pictures_B])
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


def guide(positive: torch.Tensor, negative: torch.Tensor, scale: float) -> torch.Tensor:
    """Classifier-free guidance (Ho & Salimans 2022, eq. 6) with the editor's own norm rescale.

    `negative + scale * (positive - negative)`, each token then brought back to the norm of its
    positive prediction. All [B, tokens, channels].
    """
    combined = negative + scale * (positive - negative)
    return combined * (
        torch.norm(positive, dim=-1, keepdim=True) / torch.norm(combined, dim=-1, keepdim=True)
    )


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
