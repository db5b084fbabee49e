"""The linear layers of the transformer's blocks in 8 bits, to save memory or time."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from rl.renderers.qwen_image.denoising_config import MODULATIONS

EIGHT_BITS = torch.float8_e4m3fn
LARGEST = torch.finfo(EIGHT_BITS).max
"""448."""


class Fp8Linear(nn.Module):
    """A linear layer whose weights are float8_e4m3 with a scale per output channel.

    By default it multiplies in the dtype of the activations; with `in_8_bits` it also rounds each
    token's activations, with a scale per token, and multiplies in 8 bits.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: nn.Linear, *, in_8_bits: bool) -> None:
        super().__init__()
        weight, scale = round_rows(linear.weight)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        self.in_8_bits = in_8_bits

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[.., in] -> [.., out], in the dtype of `tokens`."""
        if not self.in_8_bits:
            weight = self.weight.to(tokens.dtype) * self.scale.to(tokens.dtype)
            return F.linear(tokens, weight, self.bias)
        if not tokens.numel():
            return tokens.new_empty(*tokens.shape[:-1], len(self.weight))
        rounded, scale = round_rows(tokens.flatten(0, -2))
        product = torch._scaled_mm(
            rounded,
            self.weight.t(),
            scale_a=scale,
            scale_b=self.scale.t(),
            bias=self.bias,
            out_dtype=tokens.dtype,
        )
        return product.unflatten(0, tokens.shape[:-1])


def round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, D] -> [N, D] float8_e4m3 and its scale [N, 1] float32: each row's largest becomes 448."""
    scale = rows.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (rows / scale).to(EIGHT_BITS), scale


def round_blocks(
    transformer: Any, mode: Literal["storage", "compute"], device: str | torch.device
) -> None:
    """Move every block to `device`, its modulation apart, and replace the linear layers of its
    attention and MLPs, part by part: of the weights as they were the device holds one part."""
    for block in transformer.transformer_blocks:
        for name, part in block.named_children():
            if name not in MODULATIONS:
                _round_below(part.to(device), in_8_bits=mode == "compute")


def _round_below(module: nn.Module, *, in_8_bits: bool) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, Fp8Linear(child, in_8_bits=in_8_bits))
        else:
            _round_below(child, in_8_bits=in_8_bits)
