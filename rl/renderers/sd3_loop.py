"""The render loop of SD3, and its text encoders."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from cachetools import LRUCache, cachedmethod

from rl.api.types import RenderJob
from rl.model_files import align_weights
from rl.progress import weights_counted
from rl.renderers.diffusion_loop import DiffusionLoop, in_slices, seeded_noise
from rl.renderers.diffusion_renderer import denoise, override_scheduler, prepared
from rl.renderers.sd3_config import Config

# ---- text ----------------------------------------------------------------------------------------
# Encodes prompts with Stable Diffusion 3's three text encoders.

logger = logging.getLogger(__name__)

NUM_KEPT_PROMPTS = 64
"""Encoded prompts cached between batches and calls (2.7 MB each in bfloat16)."""


@dataclass(frozen=True, eq=False)
class TextStates:
    """One prompt, as the transformer reads it."""

    embeds: torch.Tensor
    """[1, 77 + max_t5_tokens, D]: both CLIPs side by side, zero-padded to D; then T5."""
    pooled: torch.Tensor
    """[1, P]: both CLIPs' projections."""
    num_clip_cut: int
    """Tokens beyond CLIP's 77 (markers included), which it did not read; 0 if it read all."""
    num_t5_cut: int
    """Tokens beyond max_t5_tokens, which T5 did not read; 0 if it read all, or without T5."""


@dataclass(frozen=True)
class TextParts:
    """The frozen text encoders with their tokenizers."""

    tokenizers: tuple[Any, Any]
    """CLIPTokenizer of CLIP-L and of CLIP-G."""
    encoders: tuple[Any, Any]
    """CLIPTextModelWithProjection, CLIP-L and CLIP-G."""
    tokenizer_3: Any | None
    """T5 tokenizer; None: the third encoder is left out, and its states are zeros."""
    encoder_3: Any | None
    """T5EncoderModel, or None."""


class PromptEncoder:
    """Encodes prompts as `StableDiffusion3Pipeline.encode_prompt` does for one, bit for bit.

    Each prompt is encoded alone, so that its states do not depend on other prompts and a resumed
    run renders the same bits.
    """

    def __init__(self, parts: TextParts, max_t5_tokens: int, states_dim: int) -> None:
        """`states_dim`: D, the width that the transformer reads."""
        self.parts = parts
        self._max_clip_tokens = parts.tokenizers[0].model_max_length
        self._max_t5_tokens = max_t5_tokens
        self._states_dim = states_dim
        self._cache: LRUCache[str, TextStates] = LRUCache(NUM_KEPT_PROMPTS)
        self._warned = False

    @cachedmethod(lambda self: self._cache, lambda self, prompt: prompt)
    @torch.no_grad()
    def encode(self, prompt: str) -> TextStates:
        """Encode the prompt, unless its states are cached."""
        parts = self.parts
        states, pooled, num_cut = [], [], 0
        for tokenizer, encoder in zip(parts.tokenizers, parts.encoders, strict=True):
            ids, cut = _tokenize(tokenizer, prompt, self._max_clip_tokens)
            output = encoder(ids.to(encoder.device, non_blocking=True), output_hidden_states=True)
            states.append(output.hidden_states[-2])
            pooled.append(output.text_embeds)
            num_cut = max(num_cut, cut)
        clip = torch.cat(states, dim=-1)
        clip = torch.nn.functional.pad(clip, (0, self._states_dim - clip.shape[-1]))
        t5, num_t5_cut = clip.new_zeros(1, self._max_t5_tokens, self._states_dim), 0
        if parts.encoder_3 is not None:
            # Padding is attended to, as in training.
            ids, num_t5_cut = _tokenize(parts.tokenizer_3, prompt, self._max_t5_tokens)
            t5 = parts.encoder_3(ids.to(parts.encoder_3.device, non_blocking=True))[0]
        self._warn(prompt, num_cut, num_t5_cut)
        return TextStates(
            torch.cat([clip, t5], dim=-2), torch.cat(pooled, dim=-1), num_cut, num_t5_cut
        )

    def _warn(self, prompt: str, num_clip_cut: int, num_t5_cut: int) -> None:
        """Warn once per run; the renderer's `take_metrics` counts every such prompt."""
        if self._warned or not (num_clip_cut or num_t5_cut):
            return
        self._warned = True
        reads = "no encoder" if self.parts.encoder_3 is None else "only the third encoder"
        logger.warning(
            "renderer sd3: a prompt has %d tokens beyond CLIP's %d, which %s reads, and %d beyond "
            "renderer.max_t5_tokens=%d; ask for fewer words in policy.system_prompt, or lower "
            "sampling.max_completion_tokens (logged once, counted always). The prompt: %.300s",
            *(num_clip_cut, self._max_clip_tokens, reads),
            *(num_t5_cut, self._max_t5_tokens, prompt),
        )


def _tokenize(tokenizer: Any, prompt: str, length: int) -> tuple[torch.Tensor, int]:
    """([1, length] ids, padded or cut, and how many tokens were cut off)."""
    ids = tokenizer(
        prompt, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids
    uncut_ids = tokenizer(prompt, verbose=False).input_ids
    return ids, max(0, len(uncut_ids) - length)


# ---- sd3 loop ------------------------------------------------------------------------------------
# The Stable Diffusion 3 render loop: written prompts in, pictures out.

LATENT_PX = 8
"""One latent per 8x8 px."""


@dataclass(frozen=True)
class SD3Parts:
    """The frozen modules, in evaluation mode, on one device and in one dtype."""

    transformer: Any
    """SD3Transformer2DModel."""
    vae: Any
    """AutoencoderKL."""
    scheduler: Any
    """FlowMatchEulerDiscreteScheduler; stateful, so every batch runs on a copy."""
    text: TextParts


def load_parts(config: Config, device: str) -> SD3Parts:
    """Load every part from a hub id or folder."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
    from transformers import (
        CLIPTextModelWithProjection,
        CLIPTokenizer,
        T5EncoderModel,
        T5TokenizerFast,
    )

    def load(part_class: Any, subfolder: str, **options: Any) -> Any:
        return part_class.from_pretrained(
            config.model_path, subfolder=subfolder, revision=config.revision, **options
        )

    def load_model(part_class: Any, subfolder: str, dtype_argument: str = "torch_dtype") -> Any:
        options = {"use_safetensors": True, dtype_argument: getattr(torch, config.dtype)}
        # Straight to the device: eight ranks would otherwise hold eight copies in host memory.
        model = load(part_class, subfolder, device_map={"": device}, **options)
        align_weights(model, device)
        return model.eval().requires_grad_(False)

    scheduler = load(FlowMatchEulerDiscreteScheduler, "scheduler")
    with weights_counted():
        text = TextParts(
            tokenizers=(load(CLIPTokenizer, "tokenizer"), load(CLIPTokenizer, "tokenizer_2")),
            encoders=(
                load_model(CLIPTextModelWithProjection, "text_encoder", "dtype"),
                load_model(CLIPTextModelWithProjection, "text_encoder_2", "dtype"),
            ),
            tokenizer_3=load(T5TokenizerFast, "tokenizer_3") if config.use_t5 else None,
            encoder_3=(
                load_model(T5EncoderModel, "text_encoder_3", "dtype") if config.use_t5 else None
            ),
        )
    return SD3Parts(
        transformer=load_model(SD3Transformer2DModel, "transformer"),
        vae=load_model(AutoencoderKL, "vae"),
        scheduler=override_scheduler(scheduler, config.scheduler_overrides),
        text=text,
    )


class SD3Loop(DiffusionLoop[Config, str]):
    """Draws `StableDiffusion3Pipeline`'s pictures at stock settings up to rounding. A job's payload
    is its prompt. In float32 the other jobs of a batch change a picture (0..1) by 2e-6 to 4e-6."""

    def __init__(self, config: Config, parts: SD3Parts) -> None:
        patch_px = LATENT_PX * parts.transformer.config.patch_size
        longest = patch_px * parts.transformer.config.pos_embed_max_size
        for key in ("height_px", "width_px"):
            if getattr(config, key) > longest:
                raise ValueError(
                    f"renderer.{key}: {config.model_path} makes pictures of at most {longest} px a "
                    f"side, {getattr(config, key)} given"
                )
        super().__init__(config, parts, LATENT_PX)
        self._prompts = PromptEncoder(
            parts.text, config.max_t5_tokens, parts.transformer.config.joint_attention_dim
        )
        self._cuts: list[tuple[int, int]] = []

    def take_metrics(self) -> dict[str, float]:
        """The plugin's `metrics` since the last call; {} when nothing was rendered."""
        cuts, self._cuts = self._cuts, []
        if not cuts:
            return {}
        return {
            "clip_cut_share": sum(clip > 0 for clip, _ in cuts) / len(cuts),
            "clip_cut_tokens": sum(clip for clip, _ in cuts) / len(cuts),
            "t5_cut_share": sum(t5 > 0 for _, t5 in cuts) / len(cuts),
        }

    @staticmethod
    def bucket_of(config: Config, job: RenderJob) -> str:
        return "all of one size"

    @torch.no_grad()
    def render_tensor(self, jobs: Sequence[RenderJob], bucket: str = "") -> torch.Tensor:
        """Render a batch: [B, 3, H, W], the renderer's dtype, nominally -1..1."""
        config, transformer = self.config, self.parts.transformer
        height, width = config.height_px // LATENT_PX, config.width_px // LATENT_PX
        states_B = [self._prompts.encode(job.payload) for job in jobs]
        shape = (transformer.config.in_channels, height, width)
        noise = seeded_noise((job.noise_seed for job in jobs), shape)
        latents = noise.to(transformer.device, transformer.dtype)
        embeds, pooled = self._conditioning(states_B)
        num_tokens = height * width // transformer.config.patch_size**2
        steps = {"num_inference_steps": config.num_steps}
        scheduler = prepared(self.parts.scheduler, num_tokens, transformer.device, **steps)
        latents = denoise(
            latents,
            scheduler,
            lambda step, x: self._predict(x, embeds, pooled, scheduler.timesteps[step]),
        )
        pictures = in_slices(latents, self._decode, config.height_px * config.width_px)
        self._cuts += [(states.num_clip_cut, states.num_t5_cut) for states in states_B]
        return pictures

    @cached_property
    def _negative(self) -> TextStates:
        """The states of the negative prompt, encoded once per run."""
        return self._prompts.encode(self.config.negative_prompt)

    def _conditioning(self, states_B: Sequence[TextStates]) -> tuple[torch.Tensor, torch.Tensor]:
        """Text states [R, tokens, D] and pooled states [R, P]. With guidance, the rows are all
        negative prompts, then all positive ones."""
        rows = list(states_B)
        if self.config.guidance_scale > 1:
            rows = [self._negative] * len(rows) + rows
        return torch.cat([s.embeds for s in rows]), torch.cat([s.pooled for s in rows])

    def _predict(
        self,
        latents: torch.Tensor,
        embeds: torch.Tensor,
        pooled: torch.Tensor,
        timestep: torch.Tensor,
    ) -> torch.Tensor:
        """Velocity [B, C, h, w], guided (Ho & Salimans 2022, eq. 6) if there are negative rows."""
        rows = latents.repeat(len(embeds) // len(latents), 1, 1, 1)
        velocity: torch.Tensor = self.parts.transformer(
            hidden_states=rows,
            timestep=timestep.expand(len(rows)),
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        if len(rows) == len(latents):
            return velocity
        negative, positive = velocity.chunk(2)
        return negative + self.config.guidance_scale * (positive - negative)

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        vae = self.parts.vae
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        pixels: torch.Tensor = vae.decode(latents, return_dict=False)[0]
        return pixels
