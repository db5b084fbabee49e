"""What the Qwen-Image-Edit plugs share: template, checks, counts, and opening one.

All that needs no torch, but keys and sizes (`config.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import TypeVar

from rl.api.plug import DIFFUSERS_SAFETENSORS, ModelFiles, Resources, Saving, unread
from rl.api.renderer import Renderer
from rl.api.types import PromptTemplate, RenderJob, Sample
from rl.config.paths import is_folder, not_a_file
from rl.config.schema import RunConfig
from rl.files.atomic import row_of
from rl.files.model_files import missing_model
from rl.files.weights import num_parameters
from rl.ranks.placement import resolve_device
from rl.renderers.qwen_image.config import (
    MODULATIONS,
    PATCH_PX,
    SIZE_MULTIPLE_PX,
    QwenImageConfig,
    fit_area,
)
from rl.renderers.qwen_image.step_cache import NUM_FIRST_STEPS
from rl.renderers.shared.sides import side_problems

if TYPE_CHECKING:
    from rl.renderers.shared.batches import Outcome

SYSTEM_PROMPT = (
    "Describe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. "
    "Generate a new image that meets the user's requirements while maintaining consistency with "
    "the original input where appropriate."
)
"""The words the released editors were trained under."""

DROPPED_PREFIX = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n"
"""Its tokens (64 with Qwen's tokenizer) condition the text states but are not given to the DiT."""

HUB_PARAMETERS: Mapping[str, Mapping[str, float]] = {
    hub_id: {"transformer": 13.63e9, "vae": 0.127e9}
    for hub_id in (
        "Qwen/Qwen-Image-Edit",
        "Qwen/Qwen-Image-Edit-2509",
        "Qwen/Qwen-Image-Edit-2511",
    )
}

HUB_MODULATION = 6.80e9
"""Of the same."""
HUB_STATE_DIM = 3584
"""Of Qwen2.5-VL-7B."""

ConfigT = TypeVar("ConfigT", bound=QwenImageConfig, default=QwenImageConfig)


class QwenImageEditor(Renderer[ConfigT]):
    """A plug brings the template; see `edit_template`."""

    accepts = "hidden_states"
    needs_source = True
    pipeline: ClassVar[str]
    """`_class_name` of the stock pipeline."""

    def __init__(self, config: ConfigT, resources: Resources) -> None:
        from rl.renderers.qwen_image.components import load_parts
        from rl.renderers.qwen_image.loop import QwenImageLoop

        super().__init__(config, resources)
        device = resolve_device(config.device, resources.device)
        most = type(self).prompt_template(config).max_pictures
        self.loop = QwenImageLoop(config, load_parts(config, device), most)
        self.state_dim = self.loop.state_dim

    def size_bucket(self, sample: Sample) -> tuple[int, int] | None:
        """The picture's; where that is fixed, the last source's as it is read."""
        if not sample.sources:
            return None
        is_fixed = self.config.width_px is not None
        area_px = self.config.condition_area_px if is_fixed else self.config.output_area_px
        return fit_area(area_px, sample.sources[-1].size)

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Outcome]]:
        """See `QwenImageLoop.render`."""
        return self.loop.render(jobs)

    @classmethod
    @abstractmethod
    def prompt_template(cls, config: ConfigT) -> PromptTemplate: ...

    @classmethod
    def edit_template(
        cls, config: ConfigT, picture: str = "{image}", max_pictures: int = 1
    ) -> PromptTemplate:
        """The question the editor's text encoder was trained under; the policy samples under it.

        `picture`: how each is written, `{image}` its placeholder together with its vision markers.
        """
        return PromptTemplate(
            text=DROPPED_PREFIX + "{image}{instruction}<|im_end|>\n<|im_start|>assistant\n",
            drop_prefix=DROPPED_PREFIX,
            image_area_px=config.policy_image_area_px,
            image_multiple_px=SIZE_MULTIPLE_PX,
            picture=picture,
            max_pictures=max_pictures,
        )

    @classmethod
    def negative_prompt(cls, config: ConfigT) -> str | None:
        """What the policy must encode to steer away from; None when guidance is off."""
        return config.negative_prompt if config.true_cfg_scale > 1 else None

    @classmethod
    def problems(cls, config: ConfigT, run: RunConfig) -> list[str]:
        """What is wrong across fields, each with its key and remedy; [] when all is well."""
        problems = []
        if (config.height_px is None) != (config.width_px is None):
            problems.append(
                "height_px, width_px: set both for a fixed size, or neither for output_area_px"
            )
        problems += side_problems(config, PATCH_PX)
        overrides = config.scheduler_overrides
        stretched = overrides.shift_terminal or "shift_terminal" not in overrides.model_fields_set
        if config.num_steps == 1 and stretched:
            problems.append(
                "num_steps: one step cannot be stretched to a terminal sigma (0/0); use 2 or more, "
                "or scheduler_overrides: { shift_terminal: null }"
            )
        if config.fp8 == "compute" and config.dtype != "bfloat16":
            problems.append(
                "fp8: 'compute' multiplies into bfloat16 only; set dtype: 'bfloat16', or fp8: "
                "'storage'"
            )
        if config.step_cache_interval > 1 and config.num_steps <= NUM_FIRST_STEPS:
            problems.append(
                f"step_cache_interval: the first {NUM_FIRST_STEPS} steps are always computed, of "
                f"{config.num_steps} in all; set 1, or more num_steps"
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
            yield from unread(config, "negative_prompt cfg_in_one_forward", "true_cfg_scale is 1")
        if config.height_px is not None:
            yield from unread(config, "output_area_px", "height_px and width_px are given")

    @classmethod
    def models(cls, config: ConfigT) -> Sequence[ModelFiles]:
        """The pipeline's name where it is stated, and what is loaded of it."""

        def part(subfolder: str, kind: str, **more: Any) -> ModelFiles:
            return ModelFiles(
                "model_path",
                config.model_path,
                frozenset({kind} if kind else ()),
                subfolder=subfolder,
                revision=config.revision,
                **more,
            )

        return [
            part("", cls.pipeline, config="model_index.json", config_required=False, weights=()),
            part("transformer", "QwenImageTransformer2DModel", weights=DIFFUSERS_SAFETENSORS),
            part("vae", "AutoencoderKLQwenImage", weights=DIFFUSERS_SAFETENSORS),
            part("scheduler", "", config="scheduler_config.json", weights=()),
        ]

    @classmethod
    def parameter_counts(cls, config: ConfigT) -> dict[str, float]:
        """Parameters per part on the device, for a memory plan: {'transformer': ..., 'vae': ...}.

        The transformer without its modulation (6.80 of 20.43 B); the VAE as the checkpoint has it,
        of which a third stays. Known hub ids by table, a local folder by its safetensors headers;
        {} for an unknown hub id. A weight of 8 bits counts as half of one of the dtype's 16.
        """
        folder = Path(config.model_path)
        counts = dict(HUB_PARAMETERS.get(config.model_path, {}))
        if folder.is_dir():
            counts = {
                part: num_parameters(
                    folder / part, lambda name: not MODULATIONS & set(name.split("."))
                )
                for part in ("transformer", "vae")
            }
        if config.fp8 != "off" and counts:
            counts["transformer"] /= 4 if config.dtype == "float32" else 2
        return counts

    @classmethod
    def host_parameters(cls, config: ConfigT) -> float:
        """The transformer's modulation."""
        folder = Path(config.model_path)
        if not folder.is_dir():
            return HUB_MODULATION if config.model_path in HUB_PARAMETERS else 0.0
        return num_parameters(
            folder / "transformer", lambda name: bool(MODULATIONS & set(name.split(".")))
        )

    @classmethod
    def shares_host_parameters(cls, config: ConfigT) -> bool:
        """An adapter is fused into each rank's own copy."""
        return config.lora_path is None

    @classmethod
    def activation_counts(cls, config: ConfigT) -> dict[str, float]:
        """Values alive at the peak of a forward, per part, for a memory plan.

        About 20 tensors of [tokens, 3072] in the transformer, 8 feature maps of 96 channels in the
        VAE.
        """
        rows = config.batch_size * (
            2 if config.true_cfg_scale > 1 and config.cfg_in_one_forward else 1
        )
        most = cls.prompt_template(config).max_pictures
        area_px = _output_area_px(config) + most * config.condition_area_px
        return {
            "transformer": 20 * 3072 * rows * area_px / PATCH_PX**2,
            "vae": 8 * 96 * max(_output_area_px(config), config.condition_area_px),
        }

    @classmethod
    def state_dim_of(cls, config: ConfigT) -> int | None:
        """Known hub ids', or as a local folder's transformer says it."""
        file = Path(config.model_path, "transformer", "config.json")
        if not file.is_file():
            return HUB_STATE_DIM if config.model_path in HUB_PARAMETERS else None
        stated = (row_of(file.read_bytes()) or {}).get("joint_attention_dim")
        return stated if isinstance(stated, int) else None

    @classmethod
    def picture_area_px(cls, config: ConfigT, run: RunConfig) -> int:
        return _output_area_px(config)

    @classmethod
    def savings(cls, config: ConfigT) -> Sequence[Saving]:
        """Fewer pictures at once, then smaller weights."""
        smaller = [Saving("fp8", "storage", exact=False)] if config.fp8 == "off" else []
        return [*super().savings(config), *smaller]


def _output_area_px(config: QwenImageConfig) -> int:
    return (config.height_px or 0) * (config.width_px or 0) or config.output_area_px
