"""Stores the linear layers of the transformer's blocks in 8 bits, to save memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rl.renderers.qwen_image.denoising_config import MODULATIONS

EIGHT_BITS = torch.float8_e4m3fn


class Fp8Linear(nn.Module):
    """A linear layer with float8_e4m3 weights and one scale per output channel, so that each row's
    largest weight becomes 448, the format's maximum. It multiplies in the activations' dtype."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        largest = linear.weight.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12)
        scale = largest / torch.finfo(EIGHT_BITS).max
        self.register_buffer("weight", (linear.weight / scale).to(EIGHT_BITS))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[.., in] -> [.., out], in the dtype of `tokens`."""
        weight = self.weight.to(tokens.dtype) * self.scale.to(tokens.dtype)
        return F.linear(tokens, weight, self.bias)


def round_blocks(transformer: Any, device: str | torch.device) -> None:
    """Move every block except its modulation to `device`, and replace its linear layers by
    `Fp8Linear`, part by part: the device holds the original weights of one part at a time."""
    for block in transformer.transformer_blocks:
        for name, part in block.named_children():
            if name in MODULATIONS:
                continue
            for path, layer in list(part.to(device).named_modules()):
                if isinstance(layer, nn.Linear):
                    part.set_submodule(path, Fp8Linear(layer))
