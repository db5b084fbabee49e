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
from rl.renderers.sd3_config import Config

# ---- text ----------------------------------------------------------------------------------------
# Encodes prompts with Stable Diffusion 3's three text encoders.

logger = logging.getLogger(__name__)
# They would log every prompt that is cut; the loop logs the first and counts all.
for _name in ("diffusers.pipelines.stable_diffusion_3", "transformers.tokenization_utils_base"):
    logging.getLogger(_name).setLevel(logging.ERROR)

NUM_KEPT_PROMPTS = 64
"""Encoded prompts cached between batches and calls (2.7 MB each in bfloat16)."""


@dataclass(frozen=True, eq=False)
class TextStates:
    """One prompt, as the transformer reads it."""

    embeds: torch.Tensor
    """[1, 77 + max_t5_tokens, D]: both CLIPs side by side, zero-padded to D; then T5."""
    pooled: torch.Tensor
    """[1, P]: both CLIPs' projections."""
    is_cut: tuple[bool, bool]
    """Whether it is longer than what CLIP reads (77 tokens), and than what T5 reads."""


# ---- sd3 loop ------------------------------------------------------------------------------------
# The Stable Diffusion 3 render loop: written prompts in, pictures out.

LATENT_PX = 8
"""One latent per 8x8 px."""


def load_parts(config: Config, device: str) -> Any:
    """The stock pipeline, with every part loaded from a hub id or folder and on the device."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
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

    def load_model(part_class: Any, subfolder: str, dtype_argument: str = "dtype") -> Any:
        options = {"use_safetensors": True, dtype_argument: getattr(torch, config.dtype)}
        # Straight to the device: eight ranks would otherwise hold eight copies in host memory.
        model = load(part_class, subfolder, device_map={"": device}, **options)
        align_weights(model, device)
        return model.eval().requires_grad_(False)

    with weights_counted():
        encoders = {
            "text_encoder": load_model(CLIPTextModelWithProjection, "text_encoder"),
            "text_encoder_2": load_model(CLIPTextModelWithProjection, "text_encoder_2"),
            "text_encoder_3": (
                load_model(T5EncoderModel, "text_encoder_3") if config.use_t5 else None
            ),
        }
    return StableDiffusion3Pipeline(
        transformer=load_model(SD3Transformer2DModel, "transformer", "torch_dtype"),
        vae=load_model(AutoencoderKL, "vae", "torch_dtype"),
        scheduler=load(FlowMatchEulerDiscreteScheduler, "scheduler"),
        tokenizer=load(CLIPTokenizer, "tokenizer"),
        tokenizer_2=load(CLIPTokenizer, "tokenizer_2"),
        tokenizer_3=load(T5TokenizerFast, "tokenizer_3") if config.use_t5 else None,
        **encoders,
    )


class SD3Loop(DiffusionLoop[Config, None]):
    """Draws `StableDiffusion3Pipeline`'s pictures at stock settings up to rounding. A job's payload
    is its prompt. In float32 the other jobs of a batch change a picture (0..1) by 2e-6 to 4e-6."""

    def __init__(self, config: Config, parts: Any) -> None:
        """`parts`: a StableDiffusion3Pipeline."""
        super().__init__(config, parts, LATENT_PX)
        self._kept: LRUCache[str, TextStates] = LRUCache(NUM_KEPT_PROMPTS)
        self._warned = False
        self._cuts: list[tuple[bool, bool]] = []
        parts.set_progress_bar_config(disable=True)

    def take_metrics(self) -> dict[str, float]:
        """The plugin's `metrics` since the last call; {} when nothing was rendered."""
        cuts, self._cuts = self._cuts, []
        if not cuts:
            return {}
        by_encoder = zip(("clip_cut_share", "t5_cut_share"), zip(*cuts, strict=True), strict=True)
        return {name: sum(is_cut) / len(cuts) for name, is_cut in by_encoder}

    @torch.no_grad()
    def render_tensor(self, jobs: Sequence[RenderJob], bucket: None = None) -> torch.Tensor:
        """Render a batch: [B, 3, H, W], the renderer's dtype, nominally -1..1."""
        config = self.config
        height, width = config.height_px // LATENT_PX, config.width_px // LATENT_PX
        states_B = [self._encode(job.payload) for job in jobs]
        embeds = {
            "prompt_embeds": torch.cat([states.embeds for states in states_B]),
            "pooled_prompt_embeds": torch.cat([states.pooled for states in states_B]),
        }
        if config.guidance_scale > 1:
            embeds["negative_prompt_embeds"] = self._negative.embeds.expand(len(jobs), -1, -1)
            embeds["negative_pooled_prompt_embeds"] = self._negative.pooled.expand(len(jobs), -1)
        shape = (self.parts.transformer.config.in_channels, height, width)
        [latents] = self.parts(
            height=config.height_px,
            width=config.width_px,
            num_inference_steps=config.num_steps,
            guidance_scale=config.guidance_scale,
            latents=seeded_noise((job.noise_seed for job in jobs), shape),
            output_type="latent",
            return_dict=False,
            **embeds,
        )
        pictures = in_slices(latents, self._decode, config.height_px * config.width_px)
        self._cuts += [states.is_cut for states in states_B]
        return pictures

    @cachedmethod(lambda self: self._kept, lambda self, prompt: prompt)
    @torch.no_grad()
    def _encode(self, prompt: str) -> TextStates:
        """Encode a prompt alone, unless it is cached: its states must not depend on other prompts,
        so that a resumed run renders the same bits. Warns once of a prompt that is cut."""
        pipeline, length = self.parts, self.config.max_t5_tokens
        embeds, _, pooled, _ = pipeline.encode_prompt(
            prompt, None, None, do_classifier_free_guidance=False, max_sequence_length=length
        )
        limits = (pipeline.tokenizer, pipeline.tokenizer_max_length), (pipeline.tokenizer_3, length)
        clip_cut, t5_cut = (
            tokenizer is not None and len(tokenizer(prompt, verbose=False).input_ids) > most
            for tokenizer, most in limits
        )
        if (clip_cut or t5_cut) and not self._warned:
            self._warned = True
            logger.warning(
                "renderer sd3: a prompt has more tokens than the %d that CLIP reads; T5 reads %d "
                "(renderer.max_t5_tokens; use_t5 %s). Ask for fewer words in policy.system_prompt, "
                "or lower sampling.max_completion_tokens (logged once, counted always). The "
                "prompt: %.300s",
                *(pipeline.tokenizer_max_length, length, self.config.use_t5, prompt),
            )
        return TextStates(embeds, pooled, (clip_cut, t5_cut))

    @cached_property
    def _negative(self) -> TextStates:
        """The states of the negative prompt, encoded once per run."""
        return self._encode(self.config.negative_prompt)

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        vae = self.parts.vae
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        pixels: torch.Tensor = vae.decode(latents, return_dict=False)[0]
        return pixels
