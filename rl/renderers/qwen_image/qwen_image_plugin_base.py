"""Base class of all Qwen-Image plugins: config checks, model files, parameter counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from typing_extensions import TypeVar

from rl.api.plugin import ModelFiles, Saving, unread
from rl.config.loading import is_folder, not_a_file
from rl.config.schema import RunConfig
from rl.model_files import missing_model
from rl.renderers.qwen_image.denoising_config import DenoisingConfig
from rl.renderers.shared.diffusion_renderer import DiffusionRenderer, transformer_value

TEXT_TOKENS = 300
"""Text tokens of a row, instruction and description, that a plan of an iteration's time assumes."""

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
    def problems(cls, config: ConfigT, run: RunConfig) -> list[str]:
        problems = super().problems(config, run)
        if (config.height_px is None) != (config.width_px is None):
            problems.append(
                "height_px, width_px: set both for a fixed size, or neither for output_area_px"
            )
        if config.lora_weight_name and not config.lora_path:
            problems.append("lora_weight_name: names a file of lora_path, which is not set")
        lora = config.lora_path
        if lora and not_a_file(lora):
            problems += missing_model("lora_path", lora)
            name = config.lora_weight_name
            if is_folder(lora) and name and not_a_file(Path(lora, name)):
                problems.append(f"lora_weight_name: {lora} holds no {name!r}")
        return problems

    @classmethod
    def no_effect(cls, config: ConfigT) -> Iterable[str]:
        yield from super().no_effect(config)
        if config.true_cfg_scale == 1:
            yield from unread(config, "negative_prompt", "true_cfg_scale is 1")
        if config.height_px is not None:
            yield from unread(config, "output_area_px", "height_px and width_px are given")

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
    def parameter_counts(cls, config: ConfigT) -> dict[str, float]:
        """Counted as weights of `config.dtype`; an fp8 weight is 1/2 (float32: 1/4) of one."""
        counts = super().parameter_counts(config)
        if config.fp8 != "off" and counts:
            counts["transformer"] /= 4 if config.dtype == "float32" else 2
        return counts

    @classmethod
    def transformer_params(cls, config: ConfigT) -> float:
        """Weights of the transformer on the device, of any dtype; 0 if unknown."""
        return super().parameter_counts(config).get("transformer", 0.0)

    @classmethod
    def state_dim_of(cls, config: ConfigT) -> int | None:
        """Width of the conditioning states, for a local folder or a known hub id; else None."""
        width = transformer_value(config, cls.state_dim_key)
        is_known = width is None and config.model_path in cls.hub_parameters
        return cls.hub_state_dim if is_known else width

    @classmethod
    def savings(cls, config: ConfigT) -> Sequence[Saving]:
        """Suggests a batch size of 1 first, then fp8 weights."""
        fp8 = [Saving("fp8", "storage", exact=False)] if config.fp8 == "off" else []
        return [*super().savings(config), *fp8]


def forwards_per_picture(config: DenoisingConfig) -> int:
    """Forwards of one row: the steps, twice with guidance."""
    return config.num_steps * (2 if config.true_cfg_scale > 1 else 1)


def output_area_px(config: DenoisingConfig) -> int:
    """Area of a rendered picture, px^2 (an upper bound)."""
    return (config.height_px or 0) * (config.width_px or 0) or config.output_area_px
