"""The modules of a Qwen-Image editor, loaded and laid out for rendering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rl.files.weights import align_weights
from rl.renderers.qwen_image.denoising_config import DenoisingConfig, QwenImageConfig
from rl.renderers.qwen_image.fp8 import round_blocks
from rl.renderers.qwen_image.modulation import move_without_modulation
from rl.renderers.qwen_image.vae2d import FrameVae
from rl.renderers.shared.scheduling import override_scheduler


@dataclass(frozen=True)
class EditorParts:
    """The frozen modules, in evaluation mode, on one device and in one dtype."""

    transformer: Any
    """QwenImageTransformer2DModel; its modulation in host memory."""
    vae: FrameVae
    scheduler: Any
    """FlowMatchEulerDiscreteScheduler; stateful, so every batch runs on a copy."""


def load_parts(config: QwenImageConfig, device: str) -> EditorParts:
    """Load transformer, VAE and scheduler from a hub id or folder; fuse the adapter, if any."""
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

    transformer, vae, scheduler = load_modules(
        config, device, QwenImageTransformer2DModel, AutoencoderKLQwenImage, move_without_modulation
    )
    return EditorParts(transformer, FrameVae(vae).eval().requires_grad_(False), scheduler)


def load_modules(
    config: DenoisingConfig,
    device: str,
    transformer_class: Any,
    vae_class: Any,
    move: Callable[[Any, str], object],
) -> tuple[Any, Any, Any]:
    """(transformer, VAE, scheduler) on the device; `move` takes the transformer there."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    origin = origin_of(config)
    weights = {
        "torch_dtype": getattr(torch, config.dtype),
        "use_safetensors": True,
        # Pages of the file, which the ranks of a machine share, not copies of it.
        "device_map": {"": "cpu"},
    }
    transformer = transformer_class.from_pretrained(subfolder="transformer", **origin, **weights)
    lay_out(transformer, config, device, move)
    vae = vae_class.from_pretrained(subfolder="vae", **origin, **weights).to(device)
    align_weights(transformer, device)
    align_weights(vae, device)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(subfolder="scheduler", **origin)
    return (
        transformer.eval().requires_grad_(False),
        vae,
        override_scheduler(scheduler, config.scheduler_overrides),
    )


def origin_of(config: DenoisingConfig) -> dict[str, Any]:
    """The arguments of `from_pretrained` that name the checkpoint."""
    return {"pretrained_model_name_or_path": config.model_path, "revision": config.revision}


def lay_out(
    transformer: Any, config: DenoisingConfig, device: str, move: Callable[[Any, str], object]
) -> None:
    """Bring it to the device, by `move`, with its adapter and in 8 bits where `config` says so.

    What goes over in 8 bits need not fit the device as it is: the adapter is then added in host
    memory, and blocks are rounded as they come.
    """
    if config.fp8 == "off":
        move(transformer, device)
    if config.lora_path:
        fuse_adapter(transformer, config.lora_path, config.lora_weight_name)
    if config.fp8 != "off":
        round_blocks(transformer, config.fp8, device)
        move(transformer, device)


def fuse_adapter(transformer: Any, lora_path: str, weight_name: str | None) -> None:
    """Add a few-step adapter to the weights, for good."""
    from diffusers.loaders import QwenImageLoraLoaderMixin

    # The metadata holds alpha; without it peft assumes alpha = rank and the strength is wrong.
    state_dict, metadata = QwenImageLoraLoaderMixin.lora_state_dict(
        lora_path, weight_name=weight_name, use_safetensors=True, return_lora_metadata=True
    )
    QwenImageLoraLoaderMixin.load_lora_into_transformer(state_dict, transformer, metadata=metadata)
    transformer.fuse_lora()
    transformer.unload_lora()
