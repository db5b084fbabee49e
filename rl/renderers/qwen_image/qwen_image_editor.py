"""What the Qwen-Image-Edit plugins share: template, checks, counts, and the loaded loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import TypeVar

from rl.api.plug import Resources
from rl.api.types import PromptTemplate, RenderJob
from rl.config.schema import RunConfig
from rl.files.weights import num_parameters
from rl.ranks.placement import resolve_device
from rl.renderers.qwen_image.denoising_config import (
    MODULATIONS,
    PATCH_PX,
    SIZE_MULTIPLE_PX,
    QwenImageConfig,
)
from rl.renderers.qwen_image.plug_base import QwenImage, output_area_px

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

HUB_MODULATION = 6.80e9
"""Parameters of a known hub id's modulation, which stays in host memory."""

ConfigT = TypeVar("ConfigT", bound=QwenImageConfig, default=QwenImageConfig)


class QwenImageEditor(QwenImage[ConfigT]):
    """A plugin adds the prompt template."""

    needs_source = True
    transformer_class = "QwenImageTransformer2DModel"
    vae_class = "AutoencoderKLQwenImage"
    side_multiple_px = PATCH_PX
    state_dim_key = "joint_attention_dim"
    hub_state_dim = 3584  # Qwen2.5-VL-7B
    hub_parameters: ClassVar[Mapping[str, Mapping[str, float]]] = {
        f"Qwen/Qwen-Image-Edit{version}": {"transformer": 13.63e9, "vae": 0.127e9}
        for version in ("", "-2509", "-2511")
    }

    def __init__(self, config: ConfigT, resources: Resources) -> None:
        from rl.renderers.qwen_image.qwen_image_components import load_parts
        from rl.renderers.qwen_image.qwen_image_loop import QwenImageLoop

        super().__init__(config, resources)
        device = resolve_device(config.device, resources.device)
        most = type(self).prompt_template(config).max_pictures
        self.loop = QwenImageLoop(config, load_parts(config, device), most)
        self.state_dim = self.loop.state_dim

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Outcome]]:
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
    def problems(cls, config: ConfigT, run: RunConfig) -> list[str]:
        problems = super().problems(config, run)
        overrides = config.scheduler_overrides
        stretched = overrides.shift_terminal or "shift_terminal" not in overrides.model_fields_set
        if config.num_steps == 1 and stretched:
            problems.append(
                "num_steps: one step cannot be stretched to a terminal sigma (0/0); use 2 or more, "
                "or scheduler_overrides: { shift_terminal: null }"
            )
        return problems

    @classmethod
    def is_on_device(cls, parameter: str) -> bool:
        """All but the transformer's modulation (6.80 of 20.43 B parameters)."""
        return not MODULATIONS & set(parameter.split("."))

    @classmethod
    def host_parameters(cls, config: ConfigT) -> float:
        """Parameters of the transformer's modulation."""
        folder = Path(config.model_path)
        if not folder.is_dir():
            return HUB_MODULATION if config.model_path in cls.hub_parameters else 0.0
        return num_parameters(folder / "transformer", lambda name: not cls.is_on_device(name))

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
        area_px = output_area_px(config) + most * config.condition_area_px
        return {
            "transformer": 20 * 3072 * rows * area_px / PATCH_PX**2,
            "vae": 8 * 96 * max(output_area_px(config), config.condition_area_px),
        }
