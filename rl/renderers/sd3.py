"""Renderer plugin: Stable Diffusion 3 and 3.5, from a written prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rl.api.metric import Metric
from rl.api.plugin import SAFETENSORS, ModelCost, ModelFiles
from rl.renderers.diffusion_renderer import (
    PATCH_PX,
    DiffusionRenderer,
    HubParameters,
    LoopAndLoader,
    shape_of,
)
from rl.renderers.sd3_config import Config

TEXT_TOKENS_CLIP = 77
"""CLIP's context length, including the start and end tokens."""
MEDIUM, LARGE = (
    {"num_layers": layers, "num_attention_heads": heads, "attention_head_dim": 64}
    for layers, heads in ((24, 24), (38, 38))
)
"""Shapes of the transformers of SD3 Medium and SD3.5 Medium, and of SD3.5 Large."""

_ENCODERS = {"text_encoder": 123.65e6, "text_encoder_2": 694.66e6, "text_encoder_3": 4.762e9}


class SD3(DiffusionRenderer[Config]):
    """Stable Diffusion 3 or 3.5: draws a picture from the policy's text."""

    accepts = "text"
    hub_parameters: ClassVar[HubParameters] = {
        f"stabilityai/stable-diffusion-{name}": {"transformer": size, **_ENCODERS, "vae": 83.82e6}
        for name, size in (
            ("3-medium-diffusers", 2.028e9),
            ("3.5-medium", 2.243e9),
            ("3.5-large", 8.057e9),
            ("3.5-large-turbo", 8.057e9),
        )
    }
    metrics: ClassVar[Mapping[str, Metric]] = {
        "clip_cut_share": Metric(
            "0..1", "share of prompts longer than CLIP's 77 tokens, whose end it does not read"
        ),
        "t5_cut_share": Metric("0..1", "share of prompts longer than renderer.max_t5_tokens"),
    }

    @classmethod
    def loop_and_loader(cls) -> LoopAndLoader:
        from rl.renderers.sd3_loop import SD3Loop, load_parts

        return SD3Loop, load_parts

    @classmethod
    def models(cls, config: Config) -> Sequence[ModelFiles]:
        """The pipeline's parts; without `use_t5`, T5 and its tokenizer are left out."""
        clip: dict[str, Any] = {
            "classes": frozenset({"CLIPTextModelWithProjection"}),
            "weights": SAFETENSORS,
        }
        tokenizer: dict[str, Any] = {"config": "tokenizer_config.json", "weights": ()}
        parts = [
            cls.part(config, "transformer", "SD3Transformer2DModel"),
            cls.part(config, "vae", "AutoencoderKL"),
            cls.part(config, "scheduler", config="scheduler_config.json", weights=()),
            cls.part(config, "text_encoder", "clip_text_model", **clip),
            cls.part(config, "text_encoder_2", "clip_text_model", **clip),
            cls.part(config, "tokenizer", **tokenizer),
            cls.part(config, "tokenizer_2", **tokenizer),
        ]
        if config.use_t5:
            parts.append(cls.part(config, "text_encoder_3", "t5", weights=SAFETENSORS))
            parts.append(cls.part(config, "tokenizer_3", **tokenizer))
        return parts

    @classmethod
    def cost(cls, config: Config) -> ModelCost:
        """About 14 tensors of [tokens, width] are alive in the transformer, 8 feature maps of 128
        channels in the VAE, which decodes one 1024^2 picture, or smaller ones of that total area,
        at once. The text encoders' activations are left out."""
        rows = config.batch_size * (2 if config.guidance_scale > 1 else 1)
        area_px = config.height_px * config.width_px
        tokens = area_px / PATCH_PX**2 + TEXT_TOKENS_CLIP + config.max_t5_tokens
        decoded_px = max(area_px, min(config.batch_size * area_px, 1024 * 1024))
        _, width = shape_of(config, LARGE if "large" in config.model_path else MEDIUM)
        return ModelCost(
            cls.part_sizes(config),
            {"transformer": 14 * width * rows * tokens, "vae": 8 * 128 * decoded_px},
        )
