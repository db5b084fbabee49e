"""Section and base class of the renderers over a Qwen-Image transformer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field
from typing_extensions import TypeVar

from rl.api.plugin import FrozenModelConfig, ModelFiles, SavesMemory
from rl.api.types import RenderJob
from rl.config.loading import is_folder, not_a_file
from rl.config.schema import MAX_COUNT, MAX_SIDE_PX, RunConfig, Unread
from rl.files import size_of_area
from rl.model_files import missing_model
from rl.renderers.diffusion_renderer import DiffusionRenderer, SchedulerOverrides, transformer_value

# ---- denoising config ----------------------------------------------------------------------------
# Config keys that the Qwen-Image plugins share, and picture sizes computed from them.

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
    than the checkpoint needs are an approximation. Nobody has measured it with real weights. From
    20 to 8 steps, the tiny editor's pictures (0..1) change by 0.0009 on average and 0.11 at most;
    from 20 to 4, by 0.0018 and 0.27."""
    true_cfg_scale: Annotated[float, Field(ge=1, le=1000)] = 4.0
    """Classifier-free guidance scale; 1 = off, and then no negative prompt is ever encoded."""
    negative_prompt: Annotated[str, Unread("true_cfg_scale", 1)] = " "
    """What guidance steers away from; read only when true_cfg_scale > 1."""
    height_px: Annotated[int, Field(ge=32, le=MAX_SIDE_PX, multiple_of=PATCH_PX)] | None = None
    """Fixed picture height, px, multiple of 16; null = from output_area_px."""
    width_px: Annotated[int, Field(ge=32, le=MAX_SIDE_PX, multiple_of=PATCH_PX)] | None = None
    """Fixed picture width, px, multiple of 16; null = from output_area_px."""
    output_area_px: Annotated[int, Field(ge=32 * 32, le=MAX_COUNT), Unread("height_px")] = (
        1024 * 1024
    )
    """Area of the rendered picture, px^2; the last source's aspect is kept (a square without
    sources), sides in multiples of 32."""
    condition_area_px: Annotated[int, Field(ge=32 * 32, le=MAX_COUNT)] = 1024 * 1024
    """Area each source is resized to for the VAE branch, px^2; its tokens cost as much as those of
    the rendered picture. Less than the checkpoint was trained on is an approximation, perhaps a bad
    one: at a quarter, the tiny editor's pictures (0..1) change by 0.11 on average."""
    policy_image_area_px: Annotated[int, Field(ge=32 * 32, le=MAX_COUNT)] = 1024 * 1024
    """Area each source is resized to for the policy, px^2. Must equal condition_area_px for
    qwen_image_21, which replaces each of the policy's image tokens with latents of that area."""
    fp8: Annotated[Literal["off", "storage"], SavesMemory("storage", exact=False)] = "off"
    """'storage': store the matrices of the transformer's blocks in 8 bits, half their memory. An
    approximation: the tiny editor's pictures (0..1, 2 steps) change by 0.0016 on average and 0.28
    at most (bfloat16 alone: 0.0022 and 0.33), those of Qwen-Image-2.1 (20 steps) by 0.0005 and 0.02
    (bfloat16 alone: 0.0011 and 0.02)."""
    lora_path: str | None = None
    """Few-step adapter fused into the transformer: safetensors file, folder or hub id."""
    lora_weight_name: Annotated[str | None, Unread("lora_path", None)] = None
    """File name inside lora_path when that is a folder or hub id with several."""
    scheduler_overrides: SchedulerOverrides = SchedulerOverrides()
    """Values that replace keys of the checkpoint's scheduler config, for few-step adapters."""

    @property
    def most_sources(self) -> int:
        """Limit of source pictures per sample."""
        return getattr(self, "max_pictures", 1)


def condition_sizes(config: DenoisingConfig, job: RenderJob) -> list[Size]:
    """Size at which the VAE sees each source."""
    area, sources = config.condition_area_px, job.sample.sources
    return [size_of_area(*source.size, area, SIZE_MULTIPLE_PX) for source in sources]


def output_size(config: DenoisingConfig, job: RenderJob) -> Size:
    """Size of the rendered picture: of the last source's aspect, or a square without sources."""
    if config.height_px is not None and config.width_px is not None:
        return config.width_px, config.height_px
    aspect = job.sample.sources[-1].size if job.sample.sources else (1, 1)
    return size_of_area(*aspect, config.output_area_px, SIZE_MULTIPLE_PX)


class Bucket(NamedTuple):
    """The settings that jobs must share to be drawn in one batch."""

    output: Size
    """Size of the rendered picture."""
    conditions: tuple[Size, ...]
    """Size of each source as the VAE sees it."""


def edit_bucket(config: DenoisingConfig, job: RenderJob) -> Bucket | None:
    """None: no source, so no picture."""
    if not job.sample.sources:
        return None
    return Bucket(output_size(config, job), tuple(condition_sizes(config, job)))


# ---- qwen image plugin base ----------------------------------------------------------------------
# Base class of all Qwen-Image plugins: config checks, model files, parameter counts.

ConfigT = TypeVar("ConfigT", bound=DenoisingConfig, default=DenoisingConfig)


class QwenImage(DiffusionRenderer[ConfigT]):
    """A subclass adds the prompt template, the activation counts and the render loop."""

    accepts = "hidden_states"
    pipeline: ClassVar[str]
    """`_class_name` of the stock pipeline."""
    transformer_class: ClassVar[str]
    vae_class: ClassVar[str]
    state_dim_key: ClassVar[str]
    """Key of the transformer's config.json that holds the width of the conditioning states."""
    hub_state_dim: ClassVar[int]

    @classmethod
    def negative_prompt(cls, config: ConfigT) -> str | None:
        """The negative prompt, which the policy must encode; None when guidance is off."""
        return config.negative_prompt if config.true_cfg_scale > 1 else None

    @classmethod
    def problems(cls, config: ConfigT, run: RunConfig) -> Iterator[str]:
        yield from super().problems(config, run)
        lora = config.lora_path
        if lora and not_a_file(lora):
            yield from missing_model("lora_path", lora)
            name = config.lora_weight_name
            if is_folder(lora) and name and not_a_file(Path(lora, name)):
                yield f"lora_weight_name: {lora} holds no {name!r}"

    @classmethod
    def models(cls, config: ConfigT) -> Sequence[ModelFiles]:
        """The pipeline's index file, which is optional, and the parts that are loaded."""
        index = {"config": "model_index.json", "config_required": False, "weights": ()}
        return [
            cls.part(config, "", cls.pipeline, **index),
            cls.part(config, "transformer", cls.transformer_class),
            cls.part(config, "vae", cls.vae_class),
            cls.part(config, "scheduler", config="scheduler_config.json", weights=()),
        ]

    @classmethod
    def planned_weights(cls, config: ConfigT) -> Mapping[str, float]:
        """As weights of `config.dtype`, of which an fp8 weight is 1/2 (float32: 1/4)."""
        counts = cls.part_sizes(config)
        if config.fp8 != "off" and counts:
            counts["transformer"] /= 4 if config.dtype == "float32" else 2
        return counts

    @classmethod
    def state_dim_of(cls, config: ConfigT) -> int | None:
        """Width of the conditioning states, for a local folder or a known hub id; else None."""
        width = transformer_value(config, cls.state_dim_key)
        is_known = width is None and config.model_path in cls.hub_parameters
        return cls.hub_state_dim if is_known else width


def rows_per_picture(config: DenoisingConfig) -> int:
    """Rows of a batch that draw one picture: two with guidance."""
    return 2 if config.true_cfg_scale > 1 else 1


def output_area_px(config: DenoisingConfig) -> int:
    """Area of a rendered picture, px^2 (an upper bound)."""
    return (config.height_px or 0) * (config.width_px or 0) or config.output_area_px
