"""CLIPScore (Hessel et al. 2021, arXiv 2104.08718): does the picture show what the user asked for?

The picture is compared with the user's ORIGINAL prompt, never with the policy's rewriting. value =
clip(scale * max(cosine, 0), 0, 1); the paper's scale is 2.5 (its prefix "A photo depicts" is left
out).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

from PIL.Image import Image
from pydantic import Field

from rl.api.plugin import SAFETENSORS, Dtype, FrozenModelConfig, ModelFiles, Resources
from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput
from rl.config.schema import MAX_COUNT
from rl.files.weights import num_parameters
from rl.ranks.placement import resolve_device

NUM_PARAMETERS = {
    "openai/clip-vit-base-patch32": 151.28e6,
    "openai/clip-vit-base-patch16": 149.62e6,
    "openai/clip-vit-large-patch14": 427.62e6,
    "openai/clip-vit-large-patch14-336": 427.94e6,
}
MAX_WAIT_S = 0.005
"""A renderer hands over a batch of pictures within that time."""

Cosine = tuple[float, bool] | None
"""(-1..1, whether the prompt was cut); None: out of memory."""


class Config(FrozenModelConfig):
    """Which CLIP, and where it runs."""

    model_path: str = "openai/clip-vit-base-patch32"
    """Hub id of a CLIP of transformers, or a local folder."""
    dtype: Dtype = "float32"
    """Of weights and activations; cosines are taken in float32."""
    batch_size: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 16
    """Pictures scored at once, best as many as the renderer draws at once: a batch of fewer is
    filled up to it on a GPU, and costs as much; a CPU forwards each by itself."""
    scale: Annotated[float, Field(gt=0, le=1e6)] = 2.5
    """Cosine times this is the value."""


class Clip(Reward[Config]):
    """Grades pictures in batches, in a thread of its own."""

    needs = frozenset({"image"})
    reads_thoughts = False
    runs_model = True

    def __init__(self, config: Config, resources: Resources) -> None:
        """Its model on `config.device`, or on the rank's device when that is 'auto'."""
        from rl.rewards.clip.model import ClipModel

        super().__init__(config, resources)
        self._model = ClipModel(config, resolve_device(config.device, resources.device))
        self._waiting: deque[tuple[tuple[str, Image], Future[Cosine]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="clip")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    @classmethod
    def models(cls, config: Config) -> Sequence[ModelFiles]:
        """Both towers with their projections, tokenizer and image processor."""
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
    def parameter_counts(cls, config: Config) -> Mapping[str, float]:
        """Known hub ids by table, a local folder by its safetensors headers."""
        if Path(config.model_path).is_dir():
            return {"model": num_parameters(config.model_path)}
        known = NUM_PARAMETERS.get(config.model_path)
        return {} if known is None else {"model": known}

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        """Value in [0, 1]; parts `cosine` (-1..1) and `prompt_cut` (1: CLIP read only the prompt's
        beginning). No value when the device's memory is full."""
        if reward_input.image is None:
            return RewardOutput(None, failure="no_image: clip needs a rendered picture")
        started = time.monotonic()
        cosine_of: Future[Cosine] = Future()
        self._waiting.append(((reward_input.sample.instruction, reward_input.image), cosine_of))
        self._thread.submit(self._compare_batch)
        found = await asyncio.wrap_future(cosine_of)
        if found is None:
            return RewardOutput(
                None, failure="out_of_memory: no room for one picture on CLIP's device"
            )
        cosine, was_cut = found
        value = min(1.0, self.config.scale * max(cosine, 0.0))
        parts = {"cosine": cosine, "prompt_cut": float(was_cut)}
        return RewardOutput(value, parts, seconds=time.monotonic() - started)

    def _compare_batch(self) -> None:
        """In the thread: compare the first pictures that wait."""
        if not self._waiting:
            return  # an earlier batch took them all
        if len(self._waiting) < self.config.batch_size:
            time.sleep(MAX_WAIT_S)
        num_pictures = min(self.config.batch_size, len(self._waiting))
        batch = [self._waiting.popleft() for _ in range(num_pictures)]
        # False: nobody waits for that result any more.
        batch = [each for each in batch if each[1].set_running_or_notify_cancel()]
        try:
            cosines = self._model.compare([pair for pair, _ in batch])
        except BaseException as error:
            for _, cosine_of in batch:
                cosine_of.set_exception(error)
            return
        for (_, cosine_of), cosine in zip(batch, cosines, strict=True):
            cosine_of.set_result(cosine)
