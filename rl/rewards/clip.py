"""Reward plugin: CLIPScore of picture and user's prompt (Hessel et al. 2021, arXiv 2104.08718)."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

from PIL.Image import Image
from pydantic import Field

from rl.api.plugin import SAFETENSORS, Dtype, FrozenModelConfig, ModelCost, ModelFiles, Resources
from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput
from rl.config.schema import MAX_COUNT
from rl.model_files import num_parameters
from rl.ranks.dist import resolve_device

NUM_PARAMETERS = {
    "openai/clip-vit-base-patch32": 151.28e6,
    "openai/clip-vit-base-patch16": 149.62e6,
    "openai/clip-vit-large-patch14": 427.62e6,
    "openai/clip-vit-large-patch14-336": 427.94e6,
}
MAX_WAIT_S = 0.005
"""How long an incomplete batch waits for more pictures of the same rendered batch."""

Compared = tuple[float, bool] | None
"""(cosine in -1..1, whether the prompt was cut); None: out of memory."""


class Config(FrozenModelConfig):
    """Which CLIP model to use, and on which device."""

    model_path: str = "openai/clip-vit-base-patch32"
    """Hub id or local folder of a CLIP model for transformers."""
    dtype: Dtype = "float32"
    """Data type of weights and activations; cosines are computed in float32."""
    batch_size: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 16
    """Pictures scored at once; set it to the renderer's batch size. On a GPU, a smaller batch is
    padded and takes as long as a full one; a CPU scores each picture alone."""
    scale: Annotated[float, Field(gt=0, le=1e6)] = 2.5
    """The value is the cosine times this, clipped to [0, 1]."""


class Clip(Reward[Config]):
    """Grades pictures in batches, in its own thread: value = clip(scale * max(cosine, 0), 0, 1).
    The cosine is between the picture and the user's ORIGINAL prompt, not the policy's rewrite. The
    paper's scale is 2.5; its prefix "A photo depicts" is omitted."""

    needs = frozenset({"image"})
    reads_thoughts = False
    runs_model = True

    def __init__(self, config: Config, resources: Resources) -> None:
        """Loads the model to `config.device`; 'auto' is the rank's device."""
        from rl.rewards.clip_model import ClipModel

        super().__init__(config, resources)
        self._model = ClipModel(config, resolve_device(config.device, resources.device))
        self._waiting: deque[tuple[tuple[str, Image], Future[Compared]]] = deque()
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
        """Value in [0, 1]; parts `cosine` (-1..1) and `prompt_cut` (1: CLIP read only the prompt's
        beginning). No value if the device's memory is full."""
        if reward_input.image is None:
            return RewardOutput(None, failure="no_image: clip needs a rendered picture")
        started = time.monotonic()
        future: Future[Compared] = Future()
        self._waiting.append(((reward_input.sample.instruction, reward_input.image), future))
        self._thread.submit(self._compare_batch)
        scored = await asyncio.wrap_future(future)
        if scored is None:
            return RewardOutput(
                None, failure="out_of_memory: no room for one picture on CLIP's device"
            )
        cosine, was_cut = scored
        value = min(1.0, self.config.scale * max(cosine, 0.0))
        parts = {"cosine": cosine, "prompt_cut": float(was_cut)}
        return RewardOutput(value, parts, seconds=time.monotonic() - started)

    def _compare_batch(self) -> None:
        """Compare the pictures that have waited longest, at most a batch. Runs in the thread."""
        if not self._waiting:
            return  # an earlier batch included them
        if len(self._waiting) < self.config.batch_size:
            time.sleep(MAX_WAIT_S)
        num_pictures = min(self.config.batch_size, len(self._waiting))
        batch = [self._waiting.popleft() for _ in range(num_pictures)]
        # Drop pairs whose result was cancelled.
        batch = [entry for entry in batch if entry[1].set_running_or_notify_cancel()]
        try:
            cosines = self._model.compare([pair for pair, _ in batch])
        except BaseException as error:
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), cosine in zip(batch, cosines, strict=True):
            future.set_result(cosine)
