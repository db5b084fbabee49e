"""Qwen-Image-2.1's section, and which picture sizes its policy needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rl.api.types import RenderJob
from rl.config.loading import is_folder, located
from rl.config.schema import RunConfig
from rl.files import row_of
from rl.renderers.qwen_image_config import (
    SIZE_MULTIPLE_PX,
    DenoisingConfig,
    Size,
    fit_area,
    output_size,
)

# ---- qwen image 21 config ------------------------------------------------------------------------
# Config keys of renderer `qwen_image_21`; computes picture sizes and noise levels from them.

TOKENS_PER_SLOT = 4
"""Latent tokens that replace one image token of the text encoder: 2x2 latents, 32x32 px."""
NUM_POSITIONS = 8192
"""Size of the rotary table: a text token takes one entry, a picture as many as its longer side
has tokens."""
MAX_PICTURES = 100
"""The prompt numbers the pictures up to `<image100>`; no model was trained on more."""
INDEX, SIGMAS = "model_index.json", "sample_sigmas"
"""File and key where a few-step checkpoint states its noise levels."""


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
    height_px: Annotated[int, Field(ge=32, le=4096)] | None = None
    """Fixed picture height, px, multiple of 32; None = from output_area_px."""
    width_px: Annotated[int, Field(ge=32, le=4096)] | None = None
    """Fixed picture width, px, multiple of 32; None = from output_area_px."""
    max_pictures: Annotated[int, Field(ge=1, le=MAX_PICTURES)] = 10
    """Limit of sources per sample, whose keys and values are kept while a group is drawn: 2.1 GB
    each at 1024 x 1024 px."""


def condition_sizes(config: Config, sources: Sequence[Size]) -> list[Size]:
    """Size at which the VAE and the policy see each source."""
    return [fit_area(config.condition_area_px, size) for size in sources]


def drawn_size(config: Config, sources: Sequence[Size]) -> Size:
    """Size of the picture drawn from sources of these sizes."""
    return output_size(config, sources[-1] if sources else (1, 1))


def bucket_of(config: Config, job: RenderJob) -> Size:
    """Jobs whose pictures have one size may share a batch."""
    return drawn_size(config, [source.size for source in job.sample.sources])


def sigmas_of_folder(config: Config) -> Sequence[float] | None:
    """Noise levels of a local folder's model_index.json; None for a hub id, or if it has none."""
    file = Path(config.model_path, INDEX)
    return sigmas_of_index(row_of(file.read_bytes()) or {}) if file.is_file() else None


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


# ---- size check ----------------------------------------------------------------------------------
# Checks that the policy and the VAE see every source picture at the same size.

RELEASED_BOUNDS_PX = 256 * 256, 4096 * 4096
"""Smallest and largest picture area that Qwen3-VL's image processor does not resize."""
MAX_SIDE_SUM = 14.3
"""(width + height) / sqrt(area) of a 200:1 picture; the processor refuses thinner pictures."""


def areas_px(config: Config) -> tuple[int, int]:
    """Smallest and largest area of a source of any aspect ratio. Each side is rounded to a
    multiple of 32, at least 32."""
    area, multiple = config.condition_area_px, SIZE_MULTIPLE_PX
    sides = int(MAX_SIDE_SUM * area**0.5)
    return max(multiple**2, area - multiple // 2 * sides), area + multiple * sides + multiple**2


def size_problems(config: Config, run: RunConfig) -> list[str]:
    """A message per problem: the key (relative to the renderer's section), the cause, the fix.

    The VAE's latents replace the policy's image tokens at the same positions, so the policy's
    image processor must not resize pictures that the renderer has already resized.
    """
    if config.policy_image_area_px != config.condition_area_px:
        return [
            f"policy_image_area_px: {config.policy_image_area_px}, but condition_area_px is "
            f"{config.condition_area_px}: the VAE's latents replace the policy's image tokens one "
            "to one; set both to one value"
        ]
    smallest, largest = areas_px(config)
    is_folder_here = is_folder(located(str(run.policy.get("model_path"))))
    messages = []
    for key, released_px, area_px, sign in (
        ("image_min_pixels", RELEASED_BOUNDS_PX[0], smallest, 1),
        ("image_max_pixels", RELEASED_BOUNDS_PX[1], largest, -1),
    ):
        # A local model's own bounds are not read: the first batch tells if they do not suit.
        bound = run.policy.get(key) or (area_px if is_folder_here else released_px)
        if isinstance(bound, int) and sign * bound > sign * area_px:
            messages.append(
                f"condition_area_px: {config.condition_area_px}, but policy.{key} is {bound}, so "
                "that the policy would see some sources at another size than the VAE; set "
                f"policy.{key}: {area_px}"
            )
    return messages
