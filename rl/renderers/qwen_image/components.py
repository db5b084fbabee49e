"""The modules of a Qwen-Image editor, loaded and laid out for rendering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rl.files.weights import align_weights
from rl.renderers.qwen_image.config import DenoisingConfig, QwenImageConfig
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
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImageTransformer2DModel,
    )

    origin, weights = origin_of(config), weights_as(config)
    transformer = QwenImageTransformer2DModel.from_pretrained(
        subfolder="transformer", **origin, **weights
    )
    lay_out(transformer, config, device, move_without_modulation)
    vae = AutoencoderKLQwenImage.from_pretrained(subfolder="vae", **origin, **weights).to(device)
    align_weights(transformer, device)
    align_weights(vae, device)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(subfolder="scheduler", **origin)
    return EditorParts(
        transformer=transformer.eval().requires_grad_(False),
        vae=FrameVae(vae).eval().requires_grad_(False),
        scheduler=override_scheduler(scheduler, config.scheduler_overrides),
    )


def origin_of(config: DenoisingConfig) -> dict[str, Any]:
    """For `from_pretrained`: whose parts are loaded."""
    return {"pretrained_model_name_or_path": config.model_path, "revision": config.revision}


def weights_as(config: DenoisingConfig) -> dict[str, Any]:
    """For `from_pretrained`: as pages of the file, shared by the ranks of a machine, not as copies
    of it."""
    return {
        "torch_dtype": getattr(torch, config.dtype),
        "use_safetensors": True,
        "device_map": {"": "cpu"},
    }


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
