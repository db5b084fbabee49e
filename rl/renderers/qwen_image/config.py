"""What the Qwen-Image-Edit plugs share: config, sizes, template, checks, counts, build.

What: everything about these renderers that needs no torch. What not: pictures, which
`loop.py` makes. Called by `qwen_image_edit.py` and `qwen_image_edit_plus.py`, which
re-export the plug contract from here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rl.api.types import ActionKind, PromptTemplate
from rl.files.weights import num_parameters
from rl.ranks.placement import PlacedSection
from rl.renderers.qwen_image.step_cache import NUM_FIRST_STEPS
from rl.renderers.shared.checkpoint_folder import path_problems
from rl.renderers.shared.scheduling import SchedulerOverrides

if TYPE_CHECKING:
    pass

ACCEPTS: ActionKind = "hidden_states"
MAKES_IMAGES = True

SYSTEM_PROMPT = (
    "Describe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. "
    "Generate a new image that meets the user's requirements while maintaining consistency with "
    "the original input where appropriate."
)
"""The words the released editors were trained under."""

DROPPED_PREFIX = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n"
"""Its tokens (64 with Qwen's tokenizer) condition the text states but are not given to the DiT."""

SIZE_MULTIPLE_PX = 32
"""Sides that follow from an area are multiples of this, as in the stock pipelines."""

PATCH_PX = 16
"""One DiT token is 16x16 px: the VAE shrinks 8 times, latents are packed 2x2."""

CHECKPOINT_FILES = (
    "transformer/config.json",
    "vae/config.json",
    "scheduler/scheduler_config.json",
)
"""What a local checkpoint must hold, beside the weights."""

MODULATIONS = frozenset({"img_mod", "txt_mod"})
"""Layers of each transformer block that read the timestep alone: they stay in host memory."""

HUB_PARAMETERS: Mapping[str, Mapping[str, float]] = {
    hub_id: {"transformer": 13.63e9, "vae": 0.127e9}
    for hub_id in (
        "Qwen/Qwen-Image-Edit",
        "Qwen/Qwen-Image-Edit-2509",
        "Qwen/Qwen-Image-Edit-2511",
    )
}


class QwenImageConfig(PlacedSection):
    """A frozen Qwen-Image-Edit editor. The defaults are the stock pipeline's."""

    type: str
    """Name of the plug."""
    model_path: str = "Qwen/Qwen-Image-Edit"
    """Hub id, or a local folder with `transformer/`, `vae/` and `scheduler/` (safetensors)."""
    revision: str | None = None
    """Hub branch, tag or commit; None = the newest. Ignored for a local folder."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of transformer, VAE and latents; weights stored otherwise are converted when loaded."""
    num_steps: Annotated[int, Field(ge=1)] = 50
    """Denoising steps, transformer forwards per picture (twice that with guidance). Fewer than the
    checkpoint wants are an approximation: the tiny editor's pictures (0..1) move by 0.0009 in the
    mean and 0.11 at most from 20 steps to 8, by 0.0018 and 0.27 from 20 to 4."""
    true_cfg_scale: Annotated[float, Field(ge=1)] = 4.0
    """Classifier-free guidance scale; 1 = off, and then no negative prompt is ever encoded."""
    negative_prompt: str = " "
    """What guidance steers away from; read only when true_cfg_scale > 1."""
    cfg_in_one_forward: bool = True
    """True: one forward over positive and negative rows together; False: two forwards, half the
    activation memory, bit for bit the stock pipeline."""
    height_px: Annotated[int, Field(ge=32)] | None = None
    """Fixed picture height, px, multiple of 16; None = from output_area_px."""
    width_px: Annotated[int, Field(ge=32)] | None = None
    """Fixed picture width, px, multiple of 16; None = from output_area_px."""
    output_area_px: Annotated[int, Field(ge=32 * 32)] = 1024 * 1024
    """Area of the rendered picture, px^2; the source's aspect is kept, sides in multiples of 32."""
    condition_area_px: Annotated[int, Field(ge=32 * 32)] = 1024 * 1024
    """Area the source is resized to for the VAE branch, px^2; its tokens cost as much as the
    picture's own. Less than the checkpoint was trained on is an approximation, and may be a bad
    one: at a quarter of it the tiny editor's pictures (0..1) move by 0.11 in the mean."""
    policy_image_area_px: Annotated[int, Field(ge=32 * 32)] = 1024 * 1024
    """Area of the source as the policy reads it, px^2."""
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Pictures denoised together; halved for a batch that does not fit in memory."""
    attention_backend: str = "auto"
    """diffusers' name of an attention kernel ('native', '_native_cudnn', '_flash_3_hub', ...).
    'auto': on a GPU the fastest of those installed, timed on the first batch; on a CPU 'native'."""
    compile_blocks: bool = False
    """Compile the blocks around attention, once for all lengths: a minute or so at the start."""
    fp8: Literal["off", "storage", "compute"] = "off"
    """Matrices of the transformer's blocks in 8 bits. 'storage': half the weights' memory.
    'compute': activations too, for a GPU with 8-bit arithmetic; needs dtype 'bfloat16'. An
    approximation: the tiny editor's pictures (0..1, 2 steps) move by 0.0016 in the mean and 0.28 at
    most, or by 0.0038 and 0.39; bfloat16 alone moves them by 0.0022 and 0.33."""
    step_cache_interval: Annotated[int, Field(ge=1)] = 1
    """Of this many steps, after the first three, one is computed, the others are extrapolated; 1 =
    all computed. An approximation: the tiny editor's pictures (0..1) move by 0.0014 in the mean and
    0.13 at most at 20 steps and 2, 0.0044 and 0.29 at 20 and 3, 0.0026 and 0.26 at 8 and 2."""
    lora_path: str | None = None
    """Few-step adapter fused into the transformer: safetensors file, folder or hub id."""
    lora_weight_name: str | None = None
    """File name inside lora_path when that is a folder or hub id with several."""
    scheduler_overrides: SchedulerOverrides = SchedulerOverrides()
    """Replaced keys of the checkpoint's scheduler config, for few-step adapters."""


def fit_area(area_px: int, source_size: tuple[int, int]) -> tuple[int, int]:
    """(width, height) in px, multiples of 32, of about `area_px` in the aspect of `source_size`.

    The stock pipelines' `calculate_dimensions`, except that a very long picture keeps one patch row
    where that one rounds to nothing.
    """
    ratio = source_size[0] / source_size[1]
    width = math.sqrt(area_px * ratio)
    height = width / ratio
    sides = (round(side / SIZE_MULTIPLE_PX) * SIZE_MULTIPLE_PX for side in (width, height))
    width_px, height_px = (max(side, SIZE_MULTIPLE_PX) for side in sides)
    return width_px, height_px


def output_size(config: QwenImageConfig, source_size: tuple[int, int]) -> tuple[int, int]:
    """(width, height) in px of the rendered picture."""
    if config.height_px is not None and config.width_px is not None:
        return config.width_px, config.height_px
    return fit_area(config.output_area_px, source_size)


def edit_template(config: QwenImageConfig, picture_label: str) -> PromptTemplate:
    """The question the editor's text encoder was trained under; the policy samples under it.

    `{image}` stands for the picture's placeholder together with its vision markers.
    """
    return PromptTemplate(
        text=DROPPED_PREFIX
        + picture_label
        + "{image}{instruction}<|im_end|>\n<|im_start|>assistant\n",
        drop_prefix=DROPPED_PREFIX,
        image_area_px=config.policy_image_area_px,
        image_multiple_px=SIZE_MULTIPLE_PX,
    )


def negative_prompt(config: QwenImageConfig) -> str | None:
    """What the policy must encode to steer away from; None when guidance is off."""
    return config.negative_prompt if config.true_cfg_scale > 1 else None


def validate(config: QwenImageConfig) -> list[str]:
    """What is wrong across fields, each with its key and remedy; [] when all is well."""
    problems = []
    if (config.height_px is None) != (config.width_px is None):
        problems.append(
            "height_px, width_px: set both for a fixed size, or neither for output_area_px"
        )
    for key in ("height_px", "width_px"):
        side = getattr(config, key)
        if side is not None and side % PATCH_PX:
            near = round(side / PATCH_PX) * PATCH_PX
            problems.append(f"{key}: {side} is not a multiple of {PATCH_PX}; try {near}")
    overrides = config.scheduler_overrides
    stretched = overrides.shift_terminal or "shift_terminal" not in overrides.model_fields_set
    if config.num_steps == 1 and stretched:
        problems.append(
            "num_steps: one step cannot be stretched to a terminal sigma (0/0); use 2 or more, or "
            "scheduler_overrides: { shift_terminal: null }"
        )
    if config.fp8 == "compute" and config.dtype != "bfloat16":
        problems.append(
            "fp8: 'compute' multiplies into bfloat16 only; set dtype: 'bfloat16', or fp8: 'storage'"
        )
    if config.step_cache_interval > 1 and config.num_steps <= NUM_FIRST_STEPS:
        problems.append(
            f"step_cache_interval: the first {NUM_FIRST_STEPS} steps are always computed, of "
            f"{config.num_steps} in all; set 1, or more num_steps"
        )
    if config.lora_weight_name and not config.lora_path:
        problems.append("lora_weight_name: names a file of lora_path, which is not set")
    return problems + path_problems(config.model_path, CHECKPOINT_FILES)


def parameter_counts(config: QwenImageConfig) -> dict[str, float]:
    """Parameters per part on the device, for a memory plan: {'transformer': ..., 'vae': ...}.

    The transformer without its modulation (6.80 of 20.43 B); the VAE as the checkpoint has it, of
    which a third stays. Known hub ids by table, a local folder by its safetensors headers; {} for
    an unknown hub id. A weight of 8 bits counts as half of one of the dtype's 16.
    """
    folder = Path(config.model_path)
    counts = dict(HUB_PARAMETERS.get(config.model_path, {}))
    if folder.is_dir():
        counts = {
            part: num_parameters(folder / part, lambda name: not MODULATIONS & set(name.split(".")))
            for part in ("transformer", "vae")
        }
    if config.fp8 != "off" and counts:
        counts["transformer"] /= 4 if config.dtype == "float32" else 2
    return counts


def activation_counts(config: QwenImageConfig) -> dict[str, float]:
    """Values alive at the peak of a forward, per part, for a memory plan.

    About 20 tensors of [tokens, 3072] in the transformer, 8 feature maps of 96 channels in the VAE.
    """
    rows = config.batch_size * (2 if config.true_cfg_scale > 1 and config.cfg_in_one_forward else 1)
    fixed = (config.height_px or 0) * (config.width_px or 0)
    area_px = (fixed or config.output_area_px) + config.condition_area_px
    return {
        "transformer": 20 * 3072 * rows * area_px / PATCH_PX**2,
        "vae": 8 * 96 * max(fixed or config.output_area_px, config.condition_area_px),
    }
