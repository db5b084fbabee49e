"""Config keys that the Qwen-Image plugins share, and picture sizes computed from them."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from rl.api.plugin import FrozenModelConfig
from rl.config.schema import MAX_COUNT, MAX_SIDE_PX
from rl.renderers.shared.scheduling import SchedulerOverrides

SIZE_MULTIPLE_PX = 32
"""Sides computed from an area are multiples of this, as in the stock pipelines."""

PATCH_PX = 16
"""One DiT token is 16x16 px: the VAE shrinks 8 times, latents are packed 2x2."""

MODULATIONS = frozenset({"img_mod", "txt_mod"})
"""Layers of each transformer block whose only input is the timestep; they stay in host memory."""

Size = tuple[int, int]
"""(width, height), px."""


class DenoisingConfig(FrozenModelConfig):
    """A frozen Qwen-Image. The defaults are the stock editing pipeline's."""

    model_path: str = "Qwen/Qwen-Image-Edit"
    """Hub id, or a local folder with `transformer/`, `vae/` and `scheduler/` (safetensors)."""
    num_steps: Annotated[int, Field(ge=1, le=10_000)] = 50
    """Denoising steps = transformer forwards per picture (twice as many with guidance). Fewer steps
    than the checkpoint needs are an approximation: from 20 to 8 steps, the tiny editor's pictures
    (0..1) change by 0.0009 on average and 0.11 at most; from 20 to 4, by 0.0018 and 0.27."""
    true_cfg_scale: Annotated[float, Field(ge=1, le=1000)] = 4.0
    """Classifier-free guidance scale; 1 = off, and then no negative prompt is ever encoded."""
    negative_prompt: str = " "
    """What guidance steers away from; read only when true_cfg_scale > 1."""
    height_px: Annotated[int, Field(ge=32, le=MAX_SIDE_PX)] | None = None
    """Fixed picture height, px, multiple of 16; None = from output_area_px."""
    width_px: Annotated[int, Field(ge=32, le=MAX_SIDE_PX)] | None = None
    """Fixed picture width, px, multiple of 16; None = from output_area_px."""
    output_area_px: Annotated[int, Field(ge=32 * 32, le=MAX_COUNT)] = 1024 * 1024
    """Area of the rendered picture, px^2; the last source's aspect is kept (a square without
    sources), sides in multiples of 32."""
    condition_area_px: Annotated[int, Field(ge=32 * 32, le=MAX_COUNT)] = 1024 * 1024
    """Area each source is resized to for the VAE branch, px^2; its tokens cost as much as those of
    the rendered picture. Less than the checkpoint was trained on is an approximation, perhaps a bad
    one: at a quarter, the tiny editor's pictures (0..1) change by 0.11 on average."""
    policy_image_area_px: Annotated[int, Field(ge=32 * 32, le=MAX_COUNT)] = 1024 * 1024
    """Area each source is resized to for the policy, px^2. Must equal condition_area_px for
    qwen_image_21, which replaces each of the policy's image tokens with latents of that area."""
    fp8: Literal["off", "storage"] = "off"
    """'storage': store the matrices of the transformer's blocks in 8 bits, half their memory. An
    approximation: the tiny editor's pictures (0..1, 2 steps) change by 0.0016 on average and 0.28
    at most (bfloat16 alone: 0.0022 and 0.33), those of Qwen-Image-2.1 (20 steps) by 0.0005 and 0.02
    (bfloat16 alone: 0.0011 and 0.02)."""
    lora_path: str | None = None
    """Few-step adapter fused into the transformer: safetensors file, folder or hub id."""
    lora_weight_name: str | None = None
    """File name inside lora_path when that is a folder or hub id with several."""
    scheduler_overrides: SchedulerOverrides = SchedulerOverrides()
    """Values that replace keys of the checkpoint's scheduler config, for few-step adapters."""


def fit_area(area_px: int, source_size: Size) -> Size:
    """(width, height) in px, multiples of 32, of about `area_px` with the aspect of `source_size`.

    Equals the stock pipelines' `calculate_dimensions`, except that a side of a very long picture is
    at least 32 px where the stock function rounds it to 0.
    """
    ratio = source_size[0] / source_size[1]
    width = math.sqrt(area_px * ratio)
    height = width / ratio
    sides = (round(side / SIZE_MULTIPLE_PX) * SIZE_MULTIPLE_PX for side in (width, height))
    width_px, height_px = (max(side, SIZE_MULTIPLE_PX) for side in sides)
    return width_px, height_px


def output_size(config: DenoisingConfig, source_size: Size) -> Size:
    """(width, height) in px of the rendered picture."""
    if config.height_px is not None and config.width_px is not None:
        return config.width_px, config.height_px
    return fit_area(config.output_area_px, source_size)
