"""Renderers: Qwen-Image-Edit, and Qwen-Image-Edit-Plus (2509, 2511), conditioned on states."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from rl.api.plugin import ModelCost
from rl.api.types import PromptTemplate
from rl.config.schema import MAX_COUNT
from rl.model_files import num_parameters
from rl.renderers.diffusion_renderer import HubParameters, LoopAndLoader
from rl.renderers.qwen_image_config import (
    MODULATIONS,
    PATCH_PX,
    SIZE_MULTIPLE_PX,
    ConfigT,
    DenoisingConfig,
    QwenImage,
    output_area_px,
    rows_per_picture,
)

# ---- qwen image editor ---------------------------------------------------------------------------
# Base class of the Qwen-Image-Edit plugins: prompt template, checks, parameter counts.

SYSTEM_PROMPT = (
    "Describe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. "
    "Generate a new image that meets the user's requirements while maintaining consistency with "
    "the original input where appropriate."
)
"""The system prompt with which the released editors were trained."""

DROPPED_PREFIX = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n"
"""The text states depend on its tokens (64 with Qwen's tokenizer); the DiT does not get these."""

HUB_MODULATION = 6.80e9
"""Modulation parameters of each model in `hub_parameters`; they stay in host memory."""


class QwenImageEditor(QwenImage[ConfigT]):
    """A subclass names its pipeline and how the prompt shows several pictures."""

    needs_source = True
    picture: ClassVar[str] = "{image}"
    """How the prompt shows a picture; `{image}` becomes its tokens and vision markers."""
    transformer_class = "QwenImageTransformer2DModel"
    vae_class = "AutoencoderKLQwenImage"
    state_dim_key = "joint_attention_dim"
    hub_state_dim = 3584  # Qwen2.5-VL-7B
    hub_parameters: ClassVar[HubParameters] = {
        f"Qwen/Qwen-Image-Edit{version}": {"transformer": 13.63e9, "vae": 0.127e9}
        for version in ("", "-2509", "-2511")
    }

    @classmethod
    def loop_and_loader(cls) -> LoopAndLoader:
        from rl.renderers.qwen_image_loop import QwenImageLoop, load_parts

        return QwenImageLoop, load_parts

    @classmethod
    def prompt_template(cls, config: ConfigT) -> PromptTemplate:
        """The prompt with which the editor's text encoder was trained; the policy gets the same."""
        return PromptTemplate(
            text=DROPPED_PREFIX + "{image}{instruction}<|im_end|>\n<|im_start|>assistant\n",
            drop_prefix=DROPPED_PREFIX,
            image_area_px=config.policy_image_area_px,
            image_multiple_px=SIZE_MULTIPLE_PX,
            picture=cls.picture,
            max_pictures=config.most_sources,
        )

    @classmethod
    def is_on_device(cls, parameter: str) -> bool:
        """False for the transformer's modulation (6.80 of 20.43 B parameters)."""
        return not MODULATIONS & set(parameter.split("."))

    @classmethod
    def cost(cls, config: ConfigT) -> ModelCost:
        """About 20 tensors of [tokens, 3072] are alive in the transformer, 8 feature maps of 96
        channels in the VAE.

        The transformer's modulation stays on the host; an adapter is fused into a copy per rank."""
        folder = Path(config.model_path)
        drawn_px, source_px = output_area_px(config), config.condition_area_px
        rows = config.batch_size * rows_per_picture(config)
        area_px = drawn_px + config.most_sources * source_px
        modulation = HUB_MODULATION if config.model_path in cls.hub_parameters else 0.0
        if folder.is_dir():
            modulation = num_parameters(folder / "transformer", lambda n: not cls.is_on_device(n))
        return ModelCost(
            cls.planned_weights(config),
            {
                "transformer": 20 * 3072 * rows * area_px / PATCH_PX**2,
                "vae": 8 * 96 * max(drawn_px, source_px),
            },
            modulation,
            host_shared=config.lora_path is None,
        )


# ---- qwen image edit -----------------------------------------------------------------------------
# Renderer plugin: Qwen-Image-Edit, conditioned on the policy's hidden states.


class QwenImageEdit(QwenImageEditor[DenoisingConfig]):
    """Qwen-Image-Edit: edits one source, conditioned on the policy's hidden states. The prompt has
    the source picture, then the instruction."""

    pipeline = "QwenImageEditPipeline"


# ---- qwen image edit plus ------------------------------------------------------------------------
# Renderer plugin: Qwen-Image-Edit-Plus (2509, 2511), conditioned on the policy's hidden states.


class EditPlusConfig(DenoisingConfig):
    """`renderer: { type: 'qwen_image_edit_plus', ... }`."""

    model_path: str = "Qwen/Qwen-Image-Edit-2511"
    """Hub id, or a local folder with `transformer/`, `vae/` and `scheduler/` (safetensors)."""
    policy_image_area_px: Annotated[int, Field(ge=32 * 32, le=MAX_COUNT)] = 384 * 384
    """Area of each source as the policy reads it, px^2."""
    max_pictures: Annotated[int, Field(ge=1, le=16)] = 1
    """Limit of source pictures per sample, for which memory is planned. The model was trained on 1
    to 3. The output has the aspect ratio of the last source picture."""


class QwenImageEditPlus(QwenImageEditor[EditPlusConfig]):
    """Qwen-Image-Edit-2511 or -2509: edits up to `max_pictures` sources, conditioned on the
    policy's hidden states. The prompt has the numbered, downscaled sources, then the
    instruction."""

    pipeline = "QwenImageEditPlusPipeline"
    picture = "Picture {number}: {image}"
