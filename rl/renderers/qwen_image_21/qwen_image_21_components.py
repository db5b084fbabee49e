"""The modules of a Qwen-Image-2.1, loaded and laid out for rendering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl.config.paths import is_folder
from rl.renderers.qwen_image.qwen_image_components import load_modules, origin_of
from rl.renderers.qwen_image_21 import sigmas
from rl.renderers.qwen_image_21.qwen_image_21_config import Config
from rl.renderers.qwen_image_21.vae import PictureVae


@dataclass(frozen=True)
class Parts:
    """The frozen modules, in evaluation mode, on one device and in one dtype."""

    transformer: Any
    """QwenImage21Transformer2DModel."""
    vae: PictureVae
    scheduler: Any
    """FlowMatchEulerDiscreteScheduler; stateful, so every batch runs on a copy."""
    sigmas: Sequence[float] | None = None
    """Noise levels of the steps before the shift; None: uniform."""


def load_parts(config: Config, device: str) -> Parts:
    """Load transformer, VAE and scheduler from a hub id or folder; fuse the adapter, if any. Raises
    ValueError where the checkpoint's own sigmas are not as many as the config's steps."""
    from diffusers import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel

    levels = config.sigmas or _stated(config)
    if wrong := sigmas.wrong_steps(config, levels):
        raise ValueError(f"renderer.{wrong}")
    transformer, vae, scheduler = load_modules(
        config,
        device,
        QwenImage21Transformer2DModel,
        AutoencoderKLQwenImage21,
        move=lambda model, place: model.to(place),
    )
    return Parts(transformer, PictureVae(vae).eval().requires_grad_(False), scheduler, levels)


def _stated(config: Config) -> Sequence[float] | None:
    """The checkpoint's own levels."""
    if is_folder(config.model_path):
        return sigmas.of_folder(config)
    from diffusers import DiffusionPipeline

    return sigmas.of_index(DiffusionPipeline.load_config(**origin_of(config)))
