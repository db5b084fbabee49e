"""Renderer plugin: any pipeline of diffusers as it is, conditioned on the policy's text."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from rl.api.metric import Metric
from rl.api.plugin import DIFFUSERS_SAFETENSORS, SAFETENSORS, ModelCost, ModelFiles
from rl.api.types import RenderJob
from rl.config.loading import is_dotted_path, nearest
from rl.config.schema import RunConfig
from rl.renderers.diffusion_renderer import (
    DiffusionRenderer,
    HubParameters,
    LoopAndLoader,
    shape_of,
)
from rl.renderers.stock_pipeline_config import PATCH_PX, Config, batch_of

KLEIN_SHAPE = {"num_layers": 25, "num_attention_heads": 24, "attention_head_dim": 128}
"""Shape of FLUX.2-klein-4B's transformer; memory of other hub ids is estimated from it."""
OWN_ARGUMENTS = (
    *("prompt", "generator", "latents", "height", "width", "num_inference_steps"),
    *("num_images_per_prompt", "output_type", "return_dict"),
)
"""Arguments of a call that the renderer sets itself; the config must not."""
LARGEST_PX = 1024 * 1024
"""Area with which memory is planned for source pictures, and for pictures without a stated size."""


class StockPipeline(DiffusionRenderer[Config]):
    """Any pipeline of diffusers, called as it is: the policy's text is its prompt, the sample's
    source pictures are its `image` (docs/any-editor.md)."""

    accepts = "text"
    side_multiple_px = PATCH_PX
    hub_parameters: ClassVar[HubParameters] = {
        "black-forest-labs/FLUX.2-klein-4B": {
            "text_encoder": 4.022e9,
            "transformer": 3.876e9,
            "vae": 0.084e9,
        }
    }
    metrics: ClassVar[Mapping[str, Metric]] = {
        "cut_share": Metric("0..1", "share of prompts that are longer than the pipeline's limit"),
        "cut_tokens": Metric("tokens", "tokens of a prompt beyond the pipeline's limit, mean"),
    }

    @classmethod
    def loop_and_loader(cls) -> LoopAndLoader:
        from rl.renderers.stock_pipeline_loop import StockLoop, load_parts

        return StockLoop, load_parts

    @classmethod
    def needs_source_with(cls, config: Config) -> bool:
        return config.call.image is not None

    @classmethod
    def batch_of(cls, config: Config, job: RenderJob) -> tuple[Hashable, int]:
        return batch_of(config, job)

    @classmethod
    def models(cls, config: Config) -> Sequence[ModelFiles]:
        found = sorted(Path(config.model_path).glob("*/config.json"))
        names = [file.parent.name for file in found if [*file.parent.glob("*.safetensors")]]
        weights = (*DIFFUSERS_SAFETENSORS, *SAFETENSORS)  # those of a variant are not loaded
        return [
            cls.part(config, "", config="model_index.json", weights=()),
            *(cls.part(config, name, weights=weights) for name in names),
        ]

    @classmethod
    def problems(cls, config: Config, run: RunConfig) -> Iterator[str]:
        yield from super().problems(config, run)
        call, known = config.call, pipelines()
        if not is_dotted_path(config.pipeline) and known and config.pipeline not in known:
            hint = nearest(config.pipeline, known)
            yield f"pipeline: no {config.pipeline!r} in diffusers; {hint}"
        if config.height_px and not call.sized:
            yield f"height_px: {config.pipeline} takes no size; drop both sides"
        if call.together == "all" and call.max_images > 1:
            yield (
                "interface.max_images: a call for several samples passes one source picture of "
                "each; set interface.together to 'group' or 'one'"
            )
        if taken := {*config.arguments, *call.arguments} & {*OWN_ARGUMENTS, call.image, call.area}:
            names = ", ".join(sorted(map(str, taken)))
            yield f"arguments: {names}: the renderer sets them itself; drop them"

    @classmethod
    def part_names(cls, config: Config) -> Sequence[str]:
        folder = Path(config.model_path)
        local = sorted({file.parent.name for file in folder.glob("*/*.safetensors")})
        return local or list(cls.hub_parameters.get(config.model_path, {}))

    @classmethod
    def cost(cls, config: Config) -> ModelCost:
        """About 22 tensors of [tokens, width] are alive in the transformer (21.3 to 21.8 in a
        rehearsal of FLUX.2-klein-4B's), 8 feature maps of 128 channels in the VAE, which decodes
        one picture at a time. The text encoder's activations are left out."""
        call, sizes = config.call, cls.part_sizes(config)
        area_px = (config.height_px or 0) * (config.width_px or 0) or LARGEST_PX
        seen_px = area_px + (LARGEST_PX * call.max_images if call.image else 0)
        tokens = seen_px / PATCH_PX**2 + call.max_tokens
        _, width = shape_of(config, KLEIN_SHAPE)
        working = {"transformer": 22 * width * config.batch_size * tokens, "vae": 8 * 128 * area_px}
        if config.residency == "device":
            return ModelCost(sizes, working)
        total, largest = sum(sizes.values()), max(sizes.values(), default=0.0)
        return ModelCost({}, working, total, host_shared=False, largest_part=largest)


def pipelines() -> list[str]:
    """Names of the pipelines of diffusers, read from its list without importing it; [] where it is
    not installed."""
    spec = importlib.util.find_spec("diffusers")
    if spec is None or spec.origin is None:
        return []
    text = Path(spec.origin).read_text(encoding="utf-8")
    return sorted(set(re.findall(r'"(\w+Pipeline)"', text)))
