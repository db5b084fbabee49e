"""Qwen-Image-2.1's section, and the noise levels of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from rl.renderers.diffusion_renderer import INDEX
from rl.renderers.qwen_image_config import DenoisingConfig

TOKENS_PER_SLOT = 4
"""Latent tokens that replace one image token of the text encoder: 2x2 latents, 32x32 px."""
NUM_POSITIONS = 8192
"""Size of the rotary table: a text token takes one entry, a picture as many as its longer side
has tokens."""
MAX_PICTURES = 100
"""The prompt numbers the pictures up to `<image100>`; no model was trained on more."""
SIGMAS = "sample_sigmas"
"""Key of model_index.json where a few-step checkpoint states its noise levels."""


class Config(DenoisingConfig):
    """A frozen Qwen-Image-2.1. The defaults are the stock pipeline's."""

    model_path: str = "Qwen/Qwen-Image-2.1"
    """Hub id, or a local folder with `transformer/`, `vae/` and `scheduler/` (safetensors)."""
    num_steps: Annotated[int, Field(ge=1, le=10_000)] = 40
    """Denoising steps, transformer forwards per picture (twice that with guidance). Fewer than the
    checkpoint expects are an approximation: the tiny model's pictures (0..1) change by 0.0007 on
    average and 0.02 at most from 20 steps to 8, by 0.0018 and 0.07 from 20 to 4. A checkpoint with
    noise levels (`sample_sigmas` in its model_index.json) needs as many steps as these."""
    true_cfg_scale: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Classifier-free guidance scale; 1 = off, and then no negative prompt is ever encoded."""
    height_px: Annotated[int, Field(ge=32, le=4096, multiple_of=32)] | None = None
    """Fixed picture height, px, multiple of 32; null = from output_area_px."""
    width_px: Annotated[int, Field(ge=32, le=4096, multiple_of=32)] | None = None
    """Fixed picture width, px, multiple of 32; null = from output_area_px."""
    max_pictures: Annotated[int, Field(ge=1, le=MAX_PICTURES)] = 10
    """Limit of sources per sample, whose keys and values are kept while a group is drawn: 2.1 GB
    each at 1024 x 1024 px."""


def sigmas_of_index(index: Mapping[str, Any]) -> Sequence[float] | None:
    """Noise levels in `index`; None if it has none. Raises ValueError if they are invalid."""
    levels = index.get(SIGMAS)
    if levels is None:
        return None
    if not isinstance(levels, list) or not all(
        isinstance(level, int | float) and 0 < level <= 1 for level in levels
    ):
        raise ValueError(f"{INDEX}: {SIGMAS} is not a list of numbers in (0, 1]")
    return tuple(float(level) for level in levels)


def wrong_steps(config: Config, sigmas: Sequence[float] | None) -> str:
    """A message if `num_steps` differs from the number of noise levels; else ''."""
    if sigmas is None or (number := len(sigmas)) == config.num_steps:
        return ""
    return (
        f"num_steps: {config.num_steps}, but the checkpoint has {number} {SIGMAS}; set num_steps: "
        f"{number}"
    )
