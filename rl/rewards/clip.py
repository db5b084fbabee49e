"""Reward plugin: CLIPScore of picture and user's prompt (Hessel et al. 2021, arXiv 2104.08718)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rl.api.plugin import SAFETENSORS, Dtype, FrozenModelConfig, ModelCost, ModelFiles, Resources
from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput
from rl.model_files import num_parameters
from rl.ranks.dist import resolve_device

NUM_PARAMETERS = {
    "openai/clip-vit-base-patch32": 151.28e6,
    "openai/clip-vit-base-patch16": 149.62e6,
    "openai/clip-vit-large-patch14": 427.62e6,
    "openai/clip-vit-large-patch14-336": 427.94e6,
}


class Config(FrozenModelConfig):
    """Which CLIP model to use, and on which device."""

    model_path: str = "openai/clip-vit-base-patch32"
    """Hub id or local folder of a CLIP model for transformers."""
    dtype: Dtype = "float32"
    """Data type of weights and activations; cosines are computed in float32."""
    batch_size: Literal[1] = 1
    """Pictures are scored alone, so that a cosine depends only on its pair."""
    scale: Annotated[float, Field(gt=0, le=1e6)] = 2.5
    """The value is the cosine times this, clipped to [0, 1]."""


class Clip(Reward[Config]):
    """CLIPScore of the picture and the user's ORIGINAL prompt, not the policy's rewrite. value =
    scale * cosine, clipped to 0..1. The paper's scale is 2.5; its prefix "A photo depicts" is
    omitted. Pictures are graded one by one, in a thread of its own.

    Parts: `cosine`, -1 to 1; `prompt_cut`, 1 if CLIP read only the prompt's beginning, else 0."""

    needs = frozenset({"image"})
    reads_thoughts = False
    runs_model = True

    def __init__(self, config: Config, resources: Resources) -> None:
        """Loads the model to `config.device`; 'auto' is the rank's device."""
        from rl.rewards.clip_model import ClipModel

        super().__init__(config, resources)
        self._model = ClipModel(config, resolve_device(config.device, resources.device))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="clip")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    @classmethod
    def models(cls, config: Config) -> Sequence[ModelFiles]:
        """The model (both towers with projections), its tokenizer and its image processor."""
        return [
            ModelFiles(
                "model_path",
                config.model_path,
                frozenset({"clip"}),
                frozenset({"CLIPModel"}),
                revision=config.revision,
                weights=(*SAFETENSORS, "pytorch_model.bin"),
                files=(
                    ("tokenizer.json", "vocab.json"),
                    ("preprocessor_config.json", "processor_config.json"),
                ),
            )
        ]

    @classmethod
    def cost(cls, config: Config) -> ModelCost:
        """From `NUM_PARAMETERS` or a local folder's safetensors headers; {} for other hub ids."""
        if Path(config.model_path).is_dir():
            return ModelCost({"model": num_parameters(config.model_path)})
        count = NUM_PARAMETERS.get(config.model_path)
        return ModelCost({} if count is None else {"model": count})

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        if reward_input.image is None:
            return RewardOutput(None, failure="no_image: clip needs a rendered picture")
        cosine, was_cut = await asyncio.get_running_loop().run_in_executor(
            self._thread, self._model.compare, reward_input.sample.instruction, reward_input.image
        )
        value = min(1.0, self.config.scale * max(cosine, 0.0))
        parts = {"cosine": cosine, "prompt_cut": float(was_cut)}
        return RewardOutput(value, parts)
