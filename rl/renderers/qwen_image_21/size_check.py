"""Checks that the policy and the VAE see every source picture at the same size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.config.loading import located, not_a_file
from rl.config.schema import RunConfig
from rl.files import row_of
from rl.renderers.qwen_image.denoising_config import SIZE_MULTIPLE_PX
from rl.renderers.qwen_image_21.qwen_image_21_config import Config

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


def problems(config: Config, run: RunConfig) -> list[str]:
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
    low, high = _processor_bounds(run.policy)
    messages = []
    for key, default, fix, resizes in (
        ("image_min_pixels", low, smallest, lambda bound: bound > smallest),
        ("image_max_pixels", high, largest, lambda bound: bound < largest),
    ):
        configured = run.policy.get(key)
        bound = default if configured is None else configured
        if isinstance(bound, int) and resizes(bound):
            whose = f"policy.{key} is" if configured is not None else f"the policy's own {key} is"
            messages.append(
                f"condition_area_px: {config.condition_area_px}, but {whose} {bound}, so the "
                "policy would see some sources at another size than the VAE; set "
                f"policy.{key}: {fix}"
            )
    return messages


def _processor_bounds(policy: Mapping[str, Any]) -> tuple[int, int]:
    """Area bounds of the image processor in a local folder, or else the released models' bounds."""
    model = policy.get("model_path")
    file = Path(located(model), "preprocessor_config.json") if isinstance(model, str) else None
    if file is None or not_a_file(file):
        return RELEASED_BOUNDS_PX
    values = row_of(file.read_bytes()) or {}
    size = values["size"] if isinstance(values.get("size"), dict) else {}
    low = size.get("shortest_edge", values.get("min_pixels"))
    high = size.get("longest_edge", values.get("max_pixels"))
    least, most = RELEASED_BOUNDS_PX
    return low if isinstance(low, int) else least, high if isinstance(high, int) else most
