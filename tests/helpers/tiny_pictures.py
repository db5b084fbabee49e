"""Pictures to edit, and decoder output as floats."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image


def make_picture(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    """Coarse blocks of random colour."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def as_floats(tensor: torch.Tensor) -> torch.Tensor:
    """Decoder output from -1..1 to 0..1, without the rounding to uint8."""
    return (tensor * 0.5 + 0.5).clamp(0, 1)
