"""Pictures to edit, and what a render loop draws, as floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from rl.api.types import RenderJob


def make_picture(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    """Coarse blocks of random colour."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def render_floats(renderer: Any, jobs: Sequence[RenderJob]) -> torch.Tensor:
    """[B, C, H, W] in 0..1, without the rounding to uint8; all jobs in one batch."""
    (bucket,) = {renderer.bucket_of(renderer.config, job) for job in jobs}
    return (renderer.render_tensor(jobs, bucket) * 0.5 + 0.5).clamp(0, 1)


def render_alone(renderer: Any, jobs: Sequence[RenderJob]) -> torch.Tensor:
    """As `render_floats`, with a batch for each job."""
    return torch.cat([render_floats(renderer, [job]) for job in jobs])
