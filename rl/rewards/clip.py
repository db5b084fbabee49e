"""CLIPScore (Hessel et al. 2021, arXiv 2104.08718): does the picture show what the user asked for?

The rendered picture against the user's ORIGINAL prompt (`Sample.instruction`), never against the
policy's rewriting. value = clip(scale * max(cosine, 0), 0, 1), the paper's scale being 2.5 (its
prefix "A photo depicts" is not used). What CLIP cannot read of a long prompt is cut, and reported
(`prompt_cut`).

What: the config. What not: the model (`_clip_model.py`), batching (`_batching.py`). Called by the
rollout: pictures are scored in batches, in a thread, while later ones render.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from rl.config import missing_model
from rl.rewards._batching import BatchWorker
from rl.system.placement import PlacedSection, resolve_device
from rl.system.weight_files import num_parameters
from rl.types import Evidence, Grade

if TYPE_CHECKING:
    from rl.rewards._clip_model import ClipModel

NEEDS = frozenset({"image"})
NEEDS_JUDGE = False

HUB_PARAMETERS: Mapping[str, float] = {
    "openai/clip-vit-base-patch32": 151.28e6,
    "openai/clip-vit-base-patch16": 149.62e6,
    "openai/clip-vit-large-patch14": 427.62e6,
    "openai/clip-vit-large-patch14-336": 427.94e6,
}
HUB_VISION: Mapping[str, tuple[int, int, int]] = {
    "openai/clip-vit-base-patch32": (224, 32, 768),
    "openai/clip-vit-base-patch16": (224, 16, 768),
    "openai/clip-vit-large-patch14": (224, 14, 1024),
    "openai/clip-vit-large-patch14-336": (336, 14, 1024),
}
"""(picture's side, px; patch's side, px; width of the vision tower)."""
MAX_WAIT_S = 0.005
"""A renderer hands over a batch of pictures within that time."""


class Config(PlacedSection):
    """Which CLIP, and where it runs."""

    type: str = "clip"
    """This plug."""
    model_path: str = "openai/clip-vit-base-patch32"
    """Hub id of a CLIP of transformers, or a local folder."""
    revision: str | None = None
    """Hub branch, tag or commit; null = the newest. Ignored for a local folder."""
    dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    """Of weights and activations; cosines are taken in float32."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Pictures scored at once, best as many as the renderer draws at once: a batch of fewer is
    filled up to it on a GPU, and costs as much; a CPU forwards each by itself."""
    scale: Annotated[float, Field(gt=0)] = 2.5
    """Cosine times this is the value."""

    @field_validator("model_path")
    @classmethod
    def _can_be_found(cls, path: str) -> str:
        problems = missing_model("model_path", path)
        if problems:
            raise ValueError(problems[0].removeprefix("model_path: "))
        return path


def parameter_counts(config: Config) -> dict[str, float]:
    """For a memory plan: known hub ids by table, a local folder by its safetensors headers; {} for
    an unknown hub id."""
    if Path(config.model_path).is_dir():
        return {"model": num_parameters(config.model_path)}
    known = HUB_PARAMETERS.get(config.model_path)
    return {} if known is None else {"model": known}


def activation_counts(config: Config) -> dict[str, float]:
    """Values alive at the peak of a forward, for a memory plan, rough; {} for an unknown hub id.

    Per picture of the batch its pixels and, in the vision tower, about 12 tensors of [patches + 1,
    width]: a layer's MLP is 4 wide, before and after its non-linearity. Prompts come one by one.
    """
    shape = HUB_VISION.get(config.model_path)
    file = Path(config.model_path) / "config.json"
    if file.is_file():
        stated = json.loads(file.read_text(encoding="utf-8"))["vision_config"]
        shape = (stated["image_size"], stated["patch_size"], stated["hidden_size"])
    if shape is None:
        return {}
    side_px, patch_px, width = shape
    num_tokens = (side_px // patch_px) ** 2 + 1
    return {"model": config.batch_size * (12.0 * width * num_tokens + 3 * side_px**2)}


class Clip:
    """Grades pictures in batches, in a thread of its own."""

    def __init__(self, config: Config, model: ClipModel) -> None:
        self._scale = config.scale
        self._worker = BatchWorker(model.compare, config.batch_size, MAX_WAIT_S, "clip")

    async def grade(self, evidence: Evidence) -> Grade:
        """Value in [0, 1]; parts `cosine` (-1..1) and `prompt_cut` (1: CLIP read only the prompt's
        beginning). No value when the device's memory is full."""
        if evidence.image is None:
            return Grade(None, failure="no_image: clip needs a rendered picture")
        started = time.monotonic()
        pair = (evidence.sample.instruction, evidence.image)
        found = await asyncio.wrap_future(self._worker.submit(pair))
        if found is None:
            return Grade(None, failure="out_of_memory: no room for one picture on CLIP's device")
        cosine, was_cut = found
        value = min(1.0, self._scale * max(cosine, 0.0))
        parts = {"cosine": cosine, "prompt_cut": float(was_cut)}
        return Grade(value, parts, seconds=time.monotonic() - started)


def build(config: Config, judge: object, device: str) -> Clip:
    """The reward, its model on `config.device`, or on `device` (the rank's) when that is 'auto'."""
    from rl.rewards._clip_model import ClipModel

    return Clip(config, ClipModel(config, resolve_device(config.device, device)))
