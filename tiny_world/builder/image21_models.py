"""Qwen-Image-2.1's classes at tiny size, and conversion between pictures and latents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel
from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tiny_world.builder.image21_tokenizer import MERGE, PATCH_PX
from tiny_world.builder.language import language_sizes, qwen_config
from tiny_world.builder.models import HIDDEN, to_pictures, to_tensor

LATENT_CHANNELS = 32
FOLD_PX = 4
LATENT_SIDE = 4
"""Latents along a side of a picture."""
NUM_PADS = 4
"""Image tokens (`<|image_pad|>`) per picture in the policy's prompt; each covers 2 x 2 latents."""


def make_vae() -> AutoencoderKLQwenImage21:
    """A VAE that downsamples 16x like the real one (it folds 4 x 4 pixels into channels, then
    halves twice). It has 32 latent channels, and RGBA as input and output."""
    return AutoencoderKLQwenImage21(
        base_dim=24,
        decoder_base_dim=24,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, False],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
        patch_size=FOLD_PX,
        in_channels=4 * FOLD_PX**2,
        out_channels=4 * FOLD_PX**2,
    )


def make_transformer(
    num_layers: int = 4,
    channels: int = LATENT_CHANNELS,
    head_dim: int = 32,
    text_width: int = HIDDEN,
) -> QwenImage21Transformer2DModel:
    return QwenImage21Transformer2DModel(
        in_channels=channels,
        out_channels=channels,
        num_layers=num_layers,
        attention_head_dim=head_dim,
        num_attention_heads=4,
        context_in_dim=text_width,
        axes_dims_rope=(head_dim // 4, 3 * head_dim // 8, 3 * head_dim // 8),
    )


def make_policy(tokenizer, num_layers: int = 4) -> Qwen3VLForConditionalGeneration:
    """A Qwen3-VL whose three deepstack levels are added to its first three layers."""
    text = language_sizes(HIDDEN, num_layers) | {
        "head_dim": HIDDEN // 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": PATCH_PX,
        "spatial_merge_size": MERGE,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1, 2],
    }
    policy = Qwen3VLForConditionalGeneration(qwen_config(tokenizer, text, vision, Qwen3VLConfig))
    text_config = policy.config.text_config
    policy.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=text_config.eos_token_id,
        pad_token_id=text_config.pad_token_id,
    )
    return policy


def load_policy(folder: Path) -> Qwen3VLForConditionalGeneration:
    policy = Qwen3VLForConditionalGeneration.from_pretrained(  # nosec B615 # a local folder
        folder, dtype=torch.float32
    )
    return policy.eval().requires_grad_(False)


def to_rgba(pictures: Sequence[np.ndarray]) -> torch.Tensor:
    """[64, 64, 3] uint8 pictures to opaque [B, 4, 1, 64, 64] float32 in -1..1."""
    colours = to_tensor(pictures)
    return torch.cat([colours, torch.ones_like(colours[:, :1])], 1)[:, :, None]


def latent_stats(vae) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation by channel, each [1, C, 1, 1]."""
    shape = (1, LATENT_CHANNELS, 1, 1)
    return tuple(
        torch.tensor(values).view(shape)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )


@torch.no_grad()
def encode(vae, pictures: Sequence[np.ndarray]) -> torch.Tensor:
    """Pictures to normalised latents [B, 16, C]."""
    mean, std = latent_stats(vae)
    latents = vae.encode(to_rgba(pictures)).latent_dist.mode()[:, :, 0]
    return ((latents - mean) / std).flatten(2).transpose(1, 2)


@torch.no_grad()
def decode(vae, latents: torch.Tensor) -> np.ndarray:
    """Normalised latents [B, 16, C] to [B, 64, 64, 3] uint8 on a white background."""
    mean, std = latent_stats(vae)
    grid = latents.transpose(1, 2).unflatten(2, (LATENT_SIDE, LATENT_SIDE))
    decoded = vae.decode((grid * std + mean)[:, :, None]).sample[:, :, 0]
    colours, opacity = decoded[:, :3], (decoded[:, 3:] + 1) / 2
    return to_pictures(colours * opacity + (1 - opacity))
