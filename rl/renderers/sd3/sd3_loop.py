"""The Stable Diffusion 3 render loop: written prompts in, pictures out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from rl.api.types import RenderJob
from rl.model_files import align_weights
from rl.progress import weights_counted
from rl.renderers.sd3.sd3_config import Config
from rl.renderers.sd3.text import PromptEncoder, TextParts, TextStates
from rl.renderers.shared.decoding import in_slices, seeded_noise
from rl.renderers.shared.diffusion_loop import DiffusionLoop
from rl.renderers.shared.scheduling import denoise, override_scheduler, prepared

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
