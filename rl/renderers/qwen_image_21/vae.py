"""Qwen-Image-2.1's VAE for single pictures, without what it keeps for a film's next frames.

What: diffusers' AutoencoderKLQwenImage21 has 2-D convolutions already; this leaves out the copy of
every layer's input that it keeps until the picture is done, and folds the norms' scales. Imports
torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl.meter import flop_meter
from rl.renderers.qwen_image.vae2d import FrameNorm, FrameVae


class PictureVae(FrameVae):
    """RGBA pictures to normalised latents and back; each latent is 16x16 px. Takes the given
    AutoencoderKLQwenImage21 over: that one is of no use afterwards."""

    def __init__(self, vae: Any) -> None:
        if vae.config.patch_size is not None:
            raise ValueError(
                f"vae/config.json: patch_size {vae.config.patch_size}; a Qwen-Image-2.1 has none"
            )
        _strip(vae)
        super().__init__(vae)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalised [B, C, h, w] -> [B, 4, 16h, 16w] in -1..1."""
        latents = latents.to(self.std.dtype) * self.std + self.mean
        with flop_meter.counted(self.decoder, latents.shape):
            frames: torch.Tensor = self.decoder(
                self.post_quant_conv(latents.unsqueeze(2)), first_chunk=True
            )
        return frames.squeeze(2).clamp(-1.0, 1.0)


def _strip(module: nn.Module) -> None:
    """Replace norms below `module`; drop what a first frame skips."""
    # Here, not above: diffusers imports only once `load_parts` has mended what it imports itself.
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import (
        QwenImage21Resample,
        QwenImage21RMS_norm,
    )

    for name, child in module.named_children():
        if isinstance(child, QwenImage21RMS_norm):
            setattr(module, name, FrameNorm(child))
        else:
            _strip(child)
    if isinstance(module, QwenImage21Resample) and module.mode.endswith("3d"):
        del module.time_conv
