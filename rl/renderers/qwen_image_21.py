"""Renderer plugin: Qwen-Image-2.1, which edits sources or draws from text alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rl.api.plugin import ModelCost
from rl.api.types import PromptTemplate
from rl.config.schema import RunConfig
from rl.files import MAX_SIDE_SUM
from rl.renderers.diffusion_renderer import INDEX, HubParameters, LoopAndLoader, file_of, shape_of
from rl.renderers.qwen_image_21_config import Config, sigmas_of_index, wrong_steps
from rl.renderers.qwen_image_config import (
    PATCH_PX,
    SIZE_MULTIPLE_PX,
    QwenImage,
    output_area_px,
    rows_per_picture,
)

DROPPED_PREFIX = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
"""The system turn. Later states depend on its tokens (14 with Qwen's tokenizer); its own states are
not given to the DiT."""

HUB_SHAPE = {"num_layers": 32, "num_attention_heads": 32, "attention_head_dim": 128}

PLANNED_TEXT_TOKENS = 512
"""Text tokens per row that the memory plan assumes."""
FORWARD_TENSORS, DECODER_CHANNELS = 18, 144
"""Tensors [tokens, width] alive in a forward; channels of the decoder's full-size feature maps."""


class QwenImage21(QwenImage[Config]):
    """Qwen-Image-2.1: edits up to `max_pictures` sources, or draws from text alone, conditioned on
    the policy's hidden states. The prompt has the numbered pictures, then the instruction."""

    state_kind = "pre_norm"
    reads_transparency = True
    pipeline = "QwenImage21Pipeline"
    transformer_class = "QwenImage21Transformer2DModel"
    vae_class = "AutoencoderKLQwenImage21"
    state_dim_key = "context_in_dim"
    hub_state_dim = 4096  # Qwen3-VL-8B
    hub_parameters: ClassVar[HubParameters] = {
        model: {"transformer": 7.115e9, "vae": 0.338e9}
        for model in ("Qwen/Qwen-Image-2.1", "Qwen/Qwen-Image-2.1-Turbo")
    }

    @classmethod
    def loop_and_loader(cls) -> LoopAndLoader:
        from rl.renderers.qwen_image_21_loop import QwenImage21Loop, load_parts

        return QwenImage21Loop, load_parts

    @classmethod
    def prompt_template(cls, config: Config) -> PromptTemplate:
        """The stock pipeline's prompt; only the states of the system turn are dropped."""
        return PromptTemplate(
            text=DROPPED_PREFIX
            + "<|im_start|>user\n{image}{instruction}<|im_end|>\n<|im_start|>assistant\n",
            drop_prefix=DROPPED_PREFIX,
            image_area_px=config.policy_image_area_px,
            image_multiple_px=SIZE_MULTIPLE_PX,
            picture="<image{number}>{image}",
            between_pictures=" ",
            max_pictures=config.max_pictures,
            min_pictures=0,
        )

    @classmethod
    def problems(cls, config: Config, run: RunConfig) -> Iterator[str]:
        yield from super().problems(config, run)
        if config.policy_image_area_px != config.condition_area_px:
            yield (
                f"policy_image_area_px: {config.policy_image_area_px}, but condition_area_px is "
                f"{config.condition_area_px}: the VAE's latents replace the policy's image tokens "
                "one to one; set both to one value"
            )
        # Sides become multiples of 32 px, at least 32: rounding takes at most 16 px off a side, and
        # adds at most 32 (to a thin one).
        area_px = config.condition_area_px
        sides_px = int(MAX_SIDE_SUM * area_px**0.5)
        ends = {"min": max(32**2, area_px - 16 * sides_px), "max": area_px + 32 * sides_px + 32**2}
        for end, extreme_px in ends.items():
            bound = run.policy.get(f"image_{end}_pixels") or extreme_px
            if bound > extreme_px if end == "min" else bound < extreme_px:
                yield (
                    f"condition_area_px: {area_px}, but policy.image_{end}_pixels is {bound}, "
                    "which would resize a picture for the policy and not for the VAE; set "
                    f"policy.image_{end}_pixels: {extreme_px}"
                )
        try:
            if wrong := wrong_steps(config, sigmas_of_index(file_of(config, INDEX))):
                yield wrong
        except ValueError as error:
            yield f"model_path: {error}; download it again"

    @classmethod
    def cost(cls, config: Config) -> ModelCost:
        """Values alive at the peak: in the transformer, the keys and values of `max_pictures`
        sources and of each row's text (twice with guidance), and about 18 tensors of [tokens,
        width] for the drawn pictures or for the sources, whichever have more tokens; in the VAE,
        about 8 feature maps of twice 144 channels, of one large picture or of several small ones
        (`in_slices`)."""
        layers, width = shape_of(config, HUB_SHAPE)
        drawn_px, source_px = output_area_px(config), config.condition_area_px
        drawn, source = drawn_px / PATCH_PX**2, source_px / PATCH_PX**2
        rows, kept = config.batch_size, config.max_pictures * source
        values = 2 * layers * rows_per_picture(config) * (kept + rows * PLANNED_TEXT_TOKENS)
        values += FORWARD_TENSORS * max(rows * drawn, kept)
        decoded_px = max(drawn_px, source_px, 1024 * 1024)
        return ModelCost(
            cls.planned_weights(config),
            {"transformer": width * values, "vae": 8 * 2 * DECODER_CHANNELS * decoded_px},
        )
