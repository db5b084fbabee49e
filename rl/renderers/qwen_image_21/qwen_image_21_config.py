"""The keys of `renderer: { type: 'qwen_image_21' }`, and the sizes that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rl.config.schema import MAX_COUNT
from rl.renderers.qwen_image.denoising_config import DenoisingConfig, fit_area, output_size

PATCH_PX = 16
"""One token of the transformer is one latent: 16x16 px."""
TOKENS_PER_SLOT = 4
"""What stands for one place of a picture in the text encoder's row: 2x2 latents, 32x32 px."""
NUM_POSITIONS = 8192
"""Size of the rotary table: a token of text takes one, a picture as many as its longer side has
tokens."""
MAX_PICTURES = 100
"""Their marks, `<image100>`, are text: nobody was trained on more."""

Size = tuple[int, int]
"""(width, height), px."""


class Config(DenoisingConfig):
    """A frozen Qwen-Image-2.1. The defaults are the stock pipeline's."""

    model_path: str = "Qwen/Qwen-Image-2.1"
    """Hub id, or a local folder with `transformer/`, `vae/` and `scheduler/` (safetensors)."""
    num_steps: Annotated[int, Field(ge=1, le=10_000)] = 40
    """Denoising steps, transformer forwards per picture (twice that with guidance). Fewer than the
    checkpoint wants are an approximation: the tiny one's pictures (0..1) move by 0.0007 in the mean
    and 0.02 at most from 20 steps to 8, by 0.0018 and 0.07 from 20 to 4."""
    sigmas: tuple[Annotated[float, Field(gt=0, le=1)], ...] | None = None
    """Noise level of each step before the shift, falling, without the last 0; null = what the
    checkpoint states (`sample_sigmas` of its model_index.json), or else uniform ones."""
    true_cfg_scale: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Classifier-free guidance scale; 1 = off, and then no negative prompt is ever encoded."""
    height_px: Annotated[int, Field(ge=32, le=4096)] | None = None
    """Fixed picture height, px, multiple of 32; None = from output_area_px."""
    width_px: Annotated[int, Field(ge=32, le=4096)] | None = None
    """Fixed picture width, px, multiple of 32; None = from output_area_px."""
    output_area_px: Annotated[int, Field(ge=32 * 32, le=MAX_COUNT)] = 1024 * 1024
    """Area of the rendered picture, px^2; the last source's aspect is kept, sides in multiples of
    32; a square without sources."""
    condition_area_px: Annotated[int, Field(ge=32 * 32, le=MAX_COUNT)] = 1024 * 1024
    """Area each source is resized to for the VAE, px^2. Less than the checkpoint was trained on is
    an approximation."""
    policy_image_area_px: Annotated[int, Field(ge=32 * 32, le=MAX_COUNT)] = 1024 * 1024
    """Area of each source as the policy reads it, px^2: condition_area_px, since each place of a
    picture in the policy's row gives way to the latents of the same 32x32 px."""
    max_pictures: Annotated[int, Field(ge=1, le=MAX_PICTURES)] = 10
    """Sources that a sample may have, and that a batch keeps the keys and values of: 2.1 GB each at
    1024 x 1024 px. A batch that shows more is drawn in turns; a group shows its sources once."""
    fp8: Literal["off", "storage", "compute"] = "off"
    """Matrices of the transformer's blocks in 8 bits. 'storage': half the weights' memory.
    'compute': activations too, for a GPU with 8-bit arithmetic; needs dtype 'bfloat16'. An
    approximation: 'storage' moves the tiny one's pictures (0..1, 20 steps) by 0.0005 in the mean
    and 0.02 at most; bfloat16 alone by 0.0011 and 0.02."""
    step_cache_interval: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    """Of this many steps, after the first three, one is computed, the others are extrapolated; 1 =
    all computed. An approximation: the tiny one's pictures (0..1, 20 steps) move by 0.0003 in the
    mean and 0.01 at most at 2, by 0.0004 and 0.02 at 3."""

    @model_validator(mode="after")
    def _sigmas_fall(self) -> Config:
        levels = self.sigmas
        if levels is not None and (not levels or list(levels) != sorted(set(levels), reverse=True)):
            raise ValueError("sigmas: at least one, each lower than the one before")
        return self


def condition_sizes(config: Config, sources: Sequence[Size]) -> list[Size]:
    """Size of each source as the VAE, and the policy, see it."""
    return [fit_area(config.condition_area_px, size) for size in sources]


def drawn_size(config: Config, sources: Sequence[Size]) -> Size:
    """Size of the picture drawn from sources of these sizes."""
    return output_size(config, sources[-1] if sources else (1, 1))
