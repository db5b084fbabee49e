"""The Stable Diffusion 3 render loop: written prompts in, pictures out."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from rl.api.types import RenderJob
from rl.console.progress import weights_counted
from rl.files.weights import align_weights
from rl.renderers.sd3.text import PromptEncoder, TextParts, TextStates
from rl.renderers.shared.batches import Fits, Outcome, render_in_batches
from rl.renderers.shared.decoding import decode_in_slices, seeded_noise, to_pictures
from rl.renderers.shared.scheduling import override_scheduler, resolution_shift

if TYPE_CHECKING:
    from rl.renderers.sd3.sd3_config import Config

LATENT_PX = 8
"""The VAE shrinks pictures this many times."""


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
        # Straight to the device: eight ranks would otherwise hold eight copies in host memory.
        options = {"use_safetensors": True, "device_map": {"": device}}
        dtype = {dtype_argument: getattr(torch, config.dtype)}
        model = load(part_class, subfolder, **options, **dtype)
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


class SD3Loop:
    """At stock settings equals `StableDiffusion3Pipeline` up to float rounding.

    A picture depends on its job alone: batch mates move it by float rounding, in float32 by 2e-6 to
    4e-6 of the 0..1 range.
    """

    def __init__(self, config: Config, parts: SD3Parts) -> None:
        from diffusers.image_processor import VaeImageProcessor

        patch_px = LATENT_PX * parts.transformer.config.patch_size
        longest = patch_px * parts.transformer.config.pos_embed_max_size
        for key in ("height_px", "width_px"):
            if getattr(config, key) > longest:
                raise ValueError(
                    f"renderer.{key}: {config.model_path} makes pictures of at most {longest} px a "
                    f"side, {getattr(config, key)} given"
                )
        self.config = config
        self.parts = parts
        self._prompts = PromptEncoder(
            parts.text, config.max_t5_tokens, parts.transformer.config.joint_attention_dim
        )
        self._pixels = VaeImageProcessor(vae_scale_factor=LATENT_PX)
        self._cuts: list[tuple[int, int]] = []
        self._fits: Fits = {}

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Outcome]]:
        """Yield `(number of the job, picture or failure)`, batch by batch, as they fill.

        A job's payload is the prompt. Pictures are RGB. A failing batch fails its own jobs only;
        one that does not fit in memory is halved until it does.
        """
        return render_in_batches(
            jobs,
            place=lambda job: "all of one size",
            size_of=lambda size: self.config.batch_size,
            render=lambda batch, size: to_pictures(self.render_tensor(batch), self._pixels),
            fits=self._fits,
        )

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

    @torch.no_grad()
    def render_tensor(self, jobs: Sequence[RenderJob]) -> torch.Tensor:
        """Render a batch: [B, 3, H, W], the renderer's dtype, nominally -1..1."""
        config, transformer = self.config, self.parts.transformer
        height, width = config.height_px // LATENT_PX, config.width_px // LATENT_PX
        states_B = [self._prompts.encode(job.payload) for job in jobs]
        shape = (transformer.config.in_channels, height, width)
        noise = seeded_noise((job.noise_seed for job in jobs), shape)
        latents = noise.to(transformer.device, transformer.dtype)
        conditionings = self._conditionings(states_B)
        scheduler = copy.deepcopy(self.parts.scheduler)
        num_tokens = height * width // transformer.config.patch_size**2
        shift = resolution_shift(scheduler, num_tokens)
        scheduler.set_timesteps(config.num_steps, device=transformer.device, mu=shift)
        scheduler.set_begin_index(0)
        for timestep in scheduler.timesteps:
            velocity = self._predict(latents, conditionings, timestep)
            latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        pictures = decode_in_slices(latents, self._decode)
        self._cuts += [(states.num_clip_cut, states.num_t5_cut) for states in states_B]
        return pictures

    @cached_property
    def _negative(self) -> TextStates:
        """The states of the negative prompt, encoded once a run."""
        return self._prompts.encode(self.config.negative_prompt)

    def _conditionings(
        self, states_B: Sequence[TextStates]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(embeds, pooled) per forward of a step: one of B rows, one of 2B (negatives first), or
        two of B."""
        rows = [list(states_B)]
        if self.config.guidance_scale > 1:
            negatives = [self._negative] * len(states_B)
            rows = [negatives, *rows]
            if self.config.cfg_in_one_forward:
                rows = [[*negatives, *states_B]]
        return [
            (torch.cat([s.embeds for s in states]), torch.cat([s.pooled for s in states]))
            for states in rows
        ]

    def _predict(
        self,
        latents: torch.Tensor,
        conditionings: Sequence[tuple[torch.Tensor, torch.Tensor]],
        timestep: torch.Tensor,
    ) -> torch.Tensor:
        """Velocity [B, C, h, w], guided (Ho & Salimans 2022, eq. 6) where there are negatives."""
        outputs: list[torch.Tensor] = []
        for embeds, pooled in conditionings:
            rows = latents.repeat(len(embeds) // len(latents), 1, 1, 1)
            output = self.parts.transformer(
                hidden_states=rows,
                timestep=timestep.expand(len(rows)),
                encoder_hidden_states=embeds,
                pooled_projections=pooled,
                return_dict=False,
            )[0]
            outputs.extend(output.split(len(latents)))
        if len(outputs) == 1:
            return outputs[0]
        negative, positive = outputs
        return negative + self.config.guidance_scale * (positive - negative)

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        vae = self.parts.vae
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        return vae.decode(latents, return_dict=False)[0]
