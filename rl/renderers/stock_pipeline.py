"""Renderer plugin: any pipeline of diffusers as it is, conditioned on the policy's text."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from rl.api.metric import Metric
from rl.api.plugin import DIFFUSERS_SAFETENSORS, SAFETENSORS, ModelCost, ModelFiles
from rl.api.types import RenderJob, UnusableSampleError
from rl.config.loading import nearest
from rl.config.schema import RunConfig
from rl.renderers.diffusion_renderer import (
    INDEX,
    PATCH_PX,
    DiffusionRenderer,
    HubParameters,
    LoopAndLoader,
    file_of,
    shape_of,
)
from rl.renderers.stock_pipeline_config import Config, batch_of, call_problems, sources_problem

KLEIN_SHAPE = {"num_layers": 25, "num_attention_heads": 24, "attention_head_dim": 128}
"""Shape of FLUX.2-klein-4B's transformer; memory of other hub ids is estimated from it."""
FILES = {
    "Scheduler": ("scheduler_config.json",),
    "Tokenizer": ("tokenizer_config.json",),
    "Processor": ("preprocessor_config.json", "processor_config.json"),
    "Extractor": ("preprocessor_config.json",),
}
"""Part of a class's name -> the file, or one of the files, of such a part without weights."""
LARGEST_PX = 1024 * 1024
"""Area with which memory is planned for source pictures, and for pictures without a stated size."""


class StockPipeline(DiffusionRenderer[Config]):
    """Any pipeline of diffusers, called as it is: the policy's text is its prompt, the sample's
    source pictures are its `image` (docs/any-editor.md)."""

    accepts = "text"
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
    def check_sources(cls, config: Config, sizes: Sequence[tuple[int, int] | None]) -> None:
        if problem := sources_problem(config, sizes):
            raise UnusableSampleError(problem)

    @classmethod
    def models(cls, config: Config) -> Sequence[ModelFiles]:
        models = [cls.part(config, "", config=INDEX, weights=())]
        for name, part in file_of(config, INDEX).items():
            if isinstance(part, list) and len(part) == 2 and all(part) and name[0] != "_":
                models.append(cls.part_of(config, name, *part))
        return models

    @classmethod
    def part_of(cls, config: Config, name: str, library: str, kind: str) -> ModelFiles:
        """The files of a part of the pipeline, an object of the class `kind`."""
        if files := [files for word, files in FILES.items() if word in kind]:
            return cls.part(config, name, config_required=False, weights=(), files=files)
        # Not those of a variant, which are not loaded; in the message its library's name is first.
        both = sorted([*DIFFUSERS_SAFETENSORS, *SAFETENSORS], reverse=library == "transformers")
        return cls.part(config, name, weights=both)

    @classmethod
    def problems(cls, config: Config, run: RunConfig) -> Iterator[str]:
        yield from super().problems(config, run)
        call, name, known = config.call, config.stock_name, pipelines()
        methods = methods_of(name, known[name]) if name in known else {}
        if name and known and not methods:
            yield f"pipeline: no {config.pipeline!r} in diffusers; {nearest(name, sorted(known))}"
        made, called = methods.get("__init__"), methods.get("__call__")
        index = file_of(config, INDEX)
        needed = made.args[1 : -len(made.defaults) or None] if made and index else []
        lacking = ", ".join(each.arg for each in needed if each.arg not in index)
        if lacking and index.get("_class_name") != name:  # which may do without optional ones
            yield (
                f"pipeline: {name} needs {lacking}, which {config.model_path!r} does not have; it "
                f"was made for {index.get('_class_name')}"
            )
        else:
            names = called.args + called.kwonlyargs if called and not called.kwarg else []
            yield from call_problems(config, {each.arg for each in names} or None)
        if call.together == "all" and call.max_images > 1:
            yield (
                "interface.max_images: a call for several samples passes one source picture of "
                "each; set interface.together to 'group' or 'one'"
            )

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


# ---- what is known before a model is loaded ------------------------------------------------------


@cache
def pipelines() -> dict[str, Path]:
    """Pipeline of diffusers -> its file, found without importing it; {} where it is not
    installed."""
    spec = importlib.util.find_spec("diffusers")
    files = Path(spec.origin).parent.glob("pipelines/**/*.py") if spec and spec.origin else ()
    return {
        name: file
        for file in files
        for name in re.findall(r"\nclass (\w+Pipeline)\(", file.read_text(encoding="utf-8"))
    }


def methods_of(pipeline: str, file: Path) -> dict[str, ast.arguments]:
    """Method of a class in this file -> its arguments."""
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    [cls] = [each for each in nodes if isinstance(each, ast.ClassDef) and each.name == pipeline]
    return {each.name: each.args for each in cls.body if isinstance(each, ast.FunctionDef)}
