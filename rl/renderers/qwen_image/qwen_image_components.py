"""Loads the modules of a Qwen-Image model, fuses the adapter, and moves them to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl.model_files import align_weights
from rl.renderers.qwen_image.denoising_config import DenoisingConfig
from rl.renderers.qwen_image.fp8 import round_blocks
from rl.renderers.qwen_image.modulation import move_without_modulation
from rl.renderers.qwen_image.vae2d import FrameVae
from rl.renderers.shared.scheduling import override_scheduler


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

    classes = QwenImageTransformer2DModel, AutoencoderKLQwenImage, FrameVae
    return load_modules(config, device, *classes, move_without_modulation)


def load_modules(
    config: DenoisingConfig,
    device: str,
    transformer_class: Any,
    vae_class: Any,
    frame_vae: type[FrameVae],
    move: Callable[[Any, str], object],
    sigmas: Sequence[float] | None = None,
) -> EditorParts:
    """Load transformer, VAE and scheduler; fuse the adapter, if any. `move` moves the transformer
    to the device."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    origin = origin_of(config)
    weights = {
        "torch_dtype": getattr(torch, config.dtype),
        "use_safetensors": True,
        # Memory-maps the file: the ranks of a machine share its pages instead of copying it.
        "device_map": {"": "cpu"},
    }
    transformer = transformer_class.from_pretrained(subfolder="transformer", **origin, **weights)
    prepare_transformer(transformer, config, device, move)
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


def prepare_transformer(
    transformer: Any, config: DenoisingConfig, device: str, move: Callable[[Any, str], object]
) -> None:
    """Fuse the adapter, round to 8 bits if `config.fp8` asks for it, and `move` the transformer.

    With `fp8` the unrounded weights need not fit on the device: the adapter is fused in host
    memory, and blocks are rounded one part at a time.
    """
    if config.fp8 == "off":
        move(transformer, device)
    if config.lora_path:
        fuse_adapter(transformer, config.lora_path, config.lora_weight_name)
    if config.fp8 != "off":
        round_blocks(transformer, device)
        move(transformer, device)


def fuse_adapter(transformer: Any, lora_path: str, weight_name: str | None) -> None:
    """Add a few-step adapter to the weights permanently."""
    from diffusers.loaders import QwenImageLoraLoaderMixin

    # The metadata holds alpha; without it peft assumes alpha = rank and the strength is wrong.
    state_dict, metadata = QwenImageLoraLoaderMixin.lora_state_dict(
        lora_path, weight_name=weight_name, use_safetensors=True, return_lora_metadata=True
    )
    QwenImageLoraLoaderMixin.load_lora_into_transformer(state_dict, transformer, metadata=metadata)
    transformer.fuse_lora()
    transformer.unload_lora()
