"""The Qwen-Image VAEs for single pictures, without the parts that only videos need."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders import autoencoder_kl_qwenimage as stock
from diffusers.models.autoencoders import autoencoder_kl_qwenimage21 as stock_21
from torch import nn


class FrameConv(nn.Conv2d):
    """A causal 3-D convolution for a single frame: [B, C, 1, H, W] -> [B, C', 1, H', W']"""

    def __init__(self, conv: Any) -> None:
        left, _, top, *_ = conv._padding
        super().__init__(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size[1:],
            stride=conv.stride[1:],
            padding=(top, left),
            device="meta",
        )
        self.weight = nn.Parameter(conv.weight[:, :, -1].contiguous(), requires_grad=False)
        self.bias = conv.bias

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        return super().forward(frames.squeeze(2)).unsqueeze(2)


class FrameNorm(nn.Module):
    """A QwenImageRMS_norm with the scale folded into the weight: saves two passes over features."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.gamma * norm.scale, requires_grad=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        # In float32, as in the stock layer; `float` copies nothing if the features are float32.
        normalized = F.normalize(features.float(), dim=1).to(features.dtype)
        return normalized * self.weight


class FrameVae(nn.Module):
    """Pictures to normalised latents and back. Replaces layers inside the `vae` passed to it.

    A causal kernel multiplies a single frame by its last time step only; the earlier ones meet
    zero padding. Equals the stock VAE up to rounding (1e-6 relative in float32), with a third of
    its FLOPs.
    """

    replaced: ClassVar[dict[type, Any]] = {
        stock.QwenImageCausalConv3d: FrameConv,
        stock.QwenImageRMS_norm: FrameNorm,
    }
    """diffusers' layer -> the layer that replaces it."""
    resampling: ClassVar[Any] = stock.QwenImageResample

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, vae: Any) -> None:
        super().__init__()
        for name, layer in list(vae.named_modules()):
            if new := self.replaced.get(type(layer)):
                vae.set_submodule(name, new(layer))
        for layer in vae.modules():
            if isinstance(layer, self.resampling) and layer.mode.endswith("3d"):
                del layer.time_conv  # a single frame skips it
        self.encoder = vae.encoder
        self.quant_conv = vae.quant_conv
        self.post_quant_conv = vae.post_quant_conv
        self.decoder = vae.decoder
        for name in ("mean", "std"):
            channels = getattr(vae.config, f"latents_{name}")
            statistic = torch.tensor(channels).view(1, -1, 1, 1).to(vae.device, vae.dtype)
            self.register_buffer(name, statistic)
        # The memory layout that convolutions prefer, on CPU and GPU: encoding takes half the time.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] in -1..1 -> the posterior's mode [B, C, H / 8, W / 8], normalised to mean 0
        and standard deviation 1 over the checkpoint's training pictures."""
        pixels = pixels.to(self.mean.device, self.mean.dtype).unsqueeze(2)
        moments = self.quant_conv(self.encoder(pixels)).squeeze(2)
        mode: torch.Tensor = moments.chunk(2, dim=1)[0]
        return (mode - self.mean) / self.std

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalised [B, C, h, w] -> [B, 3, 8h, 8w] in -1..1."""
        # Dividing by the reciprocal rounds as the stock pipeline does; multiplying would not.
        latents = latents.to(self.std.dtype) / (1.0 / self.std) + self.mean
        frames: torch.Tensor = self.decoder(self.post_quant_conv(latents.unsqueeze(2)))
        return frames.squeeze(2).clamp(-1.0, 1.0)


class PictureVae(FrameVae):
    """Qwen-Image-2.1's VAE: RGBA pictures to normalised latents and back, one latent per 16x16 px.
    Replaces layers inside the AutoencoderKLQwenImage21 passed to it."""

    replaced: ClassVar[dict[type, Any]] = {stock_21.QwenImage21RMS_norm: FrameNorm}
    resampling: ClassVar[Any] = stock_21.QwenImage21Resample

    def __init__(self, vae: Any) -> None:
        patch = vae.config.patch_size or 1
        self._fold = partial(stock_21._patchify, patch_size=patch)
        self._unfold = partial(stock_21._unpatchify, patch_size=patch)
        super().__init__(vae)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """[B, 4, H, W] in -1..1 -> [B, C, H / 16, W / 16], normalised as in `FrameVae.encode`."""
        return super().encode(self._fold(pixels.unsqueeze(2)).squeeze(2))

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalised [B, C, h, w] -> [B, 4, 16h, 16w] in -1..1."""
        latents = latents.to(self.std.dtype) * self.std + self.mean
        frames: torch.Tensor = self.decoder(
            self.post_quant_conv(latents.unsqueeze(2)), first_chunk=True
        )
        return self._unfold(frames).squeeze(2).clamp(-1.0, 1.0)
