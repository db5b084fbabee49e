"""The real classes at tiny size, and the tensor operations that stages share.

Legend: B batch, N latent tokens of one picture (4 x 4), L text positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageTransformer2DModel,
)
from diffusers.models.autoencoders import autoencoder_kl_qwenimage
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_shift
from transformers import GenerationConfig, Qwen2_5_VLForConditionalGeneration

from tiny_world.builder.language import language_sizes, qwen_config

HIDDEN = 128  # width of the language model = what the editor is conditioned on
LATENT_CHANNELS = 8
PATCH_PX, MERGE = 8, 2  # 64x64 px -> 8x8 patches -> 4x4 = 16 image tokens
IMAGE_TOKENS = 16
IMG_SHAPES = [(1, 4, 4), (1, 4, 4)]  # target and source pictures, in packed latents

# Keys of Qwen/Qwen-Image-Edit's scheduler that are not diffusers' defaults.
SCHEDULER = {
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "use_dynamic_shifting": True,
}


def make_vae(mean: list[float] | None = None, std: list[float] | None = None):
    """8x down (a 64x64 picture becomes 8x8 latents), with as many channels as `mean` and `std`
    (default 8)."""
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=len(mean or [0.0] * LATENT_CHANNELS),
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=mean or [0.0] * LATENT_CHANNELS,
        latents_std=std or [1.0] * LATENT_CHANNELS,
    )


def make_transformer(
    num_layers: int = 4,
    channels: int = LATENT_CHANNELS,
    heads: int = 4,
    head_dim: int = 32,
    text_width: int = HIDDEN,
    **more: bool,
) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * channels,
        out_channels=channels,
        num_layers=num_layers,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        joint_attention_dim=text_width,
        axes_dims_rope=(head_dim // 4, 3 * head_dim // 8, 3 * head_dim // 8),
        **more,
    )


def make_policy(
    tokenizer, num_layers: int = 4, hidden: int = HIDDEN
) -> Qwen2_5_VLForConditionalGeneration:
    text = language_sizes(hidden, num_layers) | {
        "rope_theta": 1e4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [4, 6, 6],  # sums to half the head size of 32
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": PATCH_PX,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "fullatt_block_indexes": [0, 1],
        "tokens_per_second": 2,
    }
    policy = Qwen2_5_VLForConditionalGeneration(qwen_config(tokenizer, text, vision))
    text_config = policy.config.text_config
    policy.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=text_config.eos_token_id,
        pad_token_id=text_config.pad_token_id,
    )
    return policy


def load_policy(folder: Path) -> Qwen2_5_VLForConditionalGeneration:
    policy = Qwen2_5_VLForConditionalGeneration.from_pretrained(  # nosec B615 # a local folder
        folder, dtype=torch.float32
    )
    return policy.eval().requires_grad_(False)


@torch.no_grad()
def unit_gain(policy) -> None:
    """Draws all matrices with unit gain: the stock 0.02 is far too small at these widths."""
    for parameter in policy.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0, 1 / math.sqrt(parameter[0].numel()))
    policy.get_input_embeddings().weight.normal_(0, 0.5)


def use_2d_convolutions() -> None:
    """Makes the VAE three times faster for single frames, with the same result up to 3e-6.

    With one frame and zeros before it, only the last temporal slice of a kernel has an effect.
    """

    def forward(self, x, cache_x=None):
        kernel, padding = self.weight[:, :, -1], (self._padding[2], self._padding[0])
        frame = F.conv2d(x[:, :, 0], kernel, self.bias, stride=self.stride[1:], padding=padding)
        return frame[:, :, None]

    autoencoder_kl_qwenimage.QwenImageCausalConv3d.forward = forward


def to_tensor(pictures: Sequence[np.ndarray]) -> torch.Tensor:
    """[64, 64, 3] uint8 pictures to [B, 3, 64, 64] float32 in -1..1."""
    return torch.as_tensor(np.stack(pictures)).float().permute(0, 3, 1, 2) / 127.5 - 1


def to_pictures(x: torch.Tensor) -> np.ndarray:
    """[B, 3, 64, 64] in -1..1 to [B, 64, 64, 3] uint8."""
    return ((x.clamp(-1, 1) + 1) * 127.5).round().permute(0, 2, 3, 1).numpy().astype(np.uint8)


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[B, C, 8, 8] to the transformer's tokens [B, N, 4 C]."""
    b, c, h, w = latents.shape
    blocks = latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return blocks.reshape(b, h * w // 4, 4 * c)


def unpack(tokens: torch.Tensor, side: int = 8) -> torch.Tensor:
    """The inverse of `pack`."""
    b, _, d = tokens.shape
    blocks = tokens.view(b, side // 2, side // 2, d // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return blocks.reshape(b, d // 4, side, side)


def latent_stats(vae) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (1, LATENT_CHANNELS, 1, 1)
    mean, std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    return mean.view(shape), std.view(shape)


@torch.no_grad()
def encode(vae, pictures: Sequence[np.ndarray]) -> torch.Tensor:
    """Pictures to normalised, packed latents [B, N, 4 C]."""
    mean, std = latent_stats(vae)
    latents = vae.encode(to_tensor(pictures)[:, :, None]).latent_dist.mode()[:, :, 0]
    return pack((latents - mean) / std)


@torch.no_grad()
def decode(vae, tokens: torch.Tensor) -> np.ndarray:
    """Normalised, packed latents to [B, 64, 64, 3] uint8."""
    mean, std = latent_stats(vae)
    return to_pictures(vae.decode((unpack(tokens) * std + mean)[:, :, None]).sample[:, :, 0])


def velocity(transformer, xt, t, source, embeds, mask) -> torch.Tensor:
    """The velocity [B, N, 4 C] of xt at times t [B], 0..1; xt, source [B, N, 4 C]; embeds
    [B, L, HIDDEN]; mask [B, L] bool."""
    return transformer(
        hidden_states=torch.cat([xt, source], 1),
        timestep=t,
        encoder_hidden_states=embeds,
        encoder_hidden_states_mask=mask,
        img_shapes=[IMG_SHAPES] * len(xt),
        return_dict=False,
    )[0][:, : xt.shape[1]]


@torch.no_grad()
def render(transformer, vae, source, embeds, mask, noise, steps: int) -> np.ndarray:
    """[B, 64, 64, 3] uint8 by Euler sampling without guidance, as QwenImageEditPipeline does it."""
    tokens = denoised(noise, steps, lambda x, t: velocity(transformer, x, t, source, embeds, mask))
    return decode(vae, tokens)


def denoised(
    noise: torch.Tensor,
    steps: int,
    velocity_at: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Latent tokens [B, N, C] after Euler steps from noise [B, N, C]; `velocity_at(tokens, t)`: t
    [B], 0..1."""
    scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER)
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    mu = calculate_shift(noise.shape[1], *(scheduler.config[name] for name in names))
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    scheduler.set_begin_index(0)
    x = noise
    for t in scheduler.timesteps:
        v = velocity_at(x, t.expand(len(x)) / 1000)
        x = scheduler.step(v, t, x, return_dict=False)[0]
    return x
