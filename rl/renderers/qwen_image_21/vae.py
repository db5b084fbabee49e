"""Qwen-Image-2.1's VAE for single pictures, without what it keeps for a film's next frames."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from rl.renderers.qwen_image.vae2d import FrameNorm, FrameVae


class PictureVae(FrameVae):
    """RGBA pictures to normalised latents and back; each latent is 16x16 px. Consumes the
    AutoencoderKLQwenImage21 it is built of."""

    def __init__(self, vae: Any) -> None:
        from diffusers.models.autoencoders import autoencoder_kl_qwenimage21 as stock

        patch = vae.config.patch_size or 1
        self._fold = partial(stock._patchify, patch_size=patch)
        self._unfold = partial(stock._unpatchify, patch_size=patch)
        _strip(vae)
        super().__init__(vae)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """[B, 4, H, W] in -1..1 -> [B, C, H / 16, W / 16]; see `FrameVae.encode`."""
        return super().encode(self._fold(pixels.unsqueeze(2)).squeeze(2))

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalised [B, C, h, w] -> [B, 4, 16h, 16w] in -1..1."""
        latents = latents.to(self.std.dtype) * self.std + self.mean
        frames: torch.Tensor = self.decoder(
            self.post_quant_conv(latents.unsqueeze(2)), first_chunk=True
        )
        return self._unfold(frames).squeeze(2).clamp(-1.0, 1.0)


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
