"""Checks that the policy and the VAE see every source picture at the same size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.config.paths import not_a_file
from rl.config.schema import RunConfig
from rl.config.shipped import located
from rl.files.atomic import row_of
from rl.renderers.qwen_image.denoising_config import SIZE_MULTIPLE_PX
from rl.renderers.qwen_image_21.qwen_image_21_config import Config

RELEASED_BOUNDS_PX = 256 * 256, 4096 * 4096
"""Smallest and largest picture area that Qwen3-VL's image processor does not resize."""
THINNEST = 14.3
"""(width + height) / sqrt(area) of a 200:1 picture; the processor refuses thinner pictures."""


def areas_px(config: Config) -> tuple[int, int]:
    """Smallest and largest area that a source of any shape can have, once each side is rounded to a
    multiple of 32, at least 32."""
    area, whole = config.condition_area_px, SIZE_MULTIPLE_PX
    sides = int(THINNEST * area**0.5)
    return max(whole**2, area - whole // 2 * sides), area + whole * sides + whole**2


def problems(config: Config, run: RunConfig) -> list[str]:
    """The problems found, each with its key (relative to the renderer's section) and its remedy.

    The VAE's latents replace the policy's image tokens at the same positions, so the policy's
    image processor must not resize pictures that the renderer has already resized.
    """
    if config.policy_image_area_px != config.condition_area_px:
        return [
            f"policy_image_area_px: {config.policy_image_area_px}, but condition_area_px is "
            f"{config.condition_area_px}: the VAE's latents replace the policy's image tokens one "
            "to one; set both alike"
        ]
    smallest, largest = areas_px(config)
    low, high = _processor_bounds(run.policy)
    found = []
    for key, known, remedy, reaches in (
        ("image_min_pixels", low, smallest, lambda bound: bound > smallest),
        ("image_max_pixels", high, largest, lambda bound: bound < largest),
    ):
        stated = run.policy.get(key)
        bound = known if stated is None else stated
        if isinstance(bound, int) and reaches(bound):
            whose = f"policy.{key} is" if stated is not None else f"the policy's own {key} is"
            found.append(
                f"condition_area_px: {config.condition_area_px}, but {whose} {bound}, and the "
                "policy would see some sources in another size than the VAE; set "
                f"policy.{key}: {remedy}"
            )
    return found


def _processor_bounds(policy: Mapping[str, Any]) -> tuple[int, int]:
    """Area bounds of a local folder's image processor, else of the released ones."""
    model = policy.get("model_path")
    file = Path(located(model), "preprocessor_config.json") if isinstance(model, str) else None
    if file is None or not_a_file(file):
        return RELEASED_BOUNDS_PX
    stated = row_of(file.read_bytes()) or {}
    size = stated["size"] if isinstance(stated.get("size"), dict) else {}
    low = size.get("shortest_edge", stated.get("min_pixels"))
    high = size.get("longest_edge", stated.get("max_pixels"))
    least, most = RELEASED_BOUNDS_PX
    return low if isinstance(low, int) else least, high if isinstance(high, int) else most
