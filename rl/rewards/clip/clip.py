"""CLIPScore (Hessel et al. 2021, arXiv 2104.08718): does the picture show what the user asked for?

The rendered picture against the user's ORIGINAL prompt (`Sample.instruction`), never against the
policy's rewriting. value = clip(scale * max(cosine, 0), 0, 1), the paper's scale being 2.5 (its
prefix "A photo depicts" is not used). What CLIP cannot read of a long prompt is cut, and reported
(`prompt_cut`). Pictures are scored in batches, in a thread, while later ones render.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl.api.plug import SAFETENSORS, ModelFiles, Resources
from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput
from rl.files.weights import num_parameters
from rl.ranks.placement import resolve_device
from rl.rewards.clip.clip_config import Config
from rl.rewards.shared.batching import BatchWorker

HUB: Mapping[str, tuple[float, tuple[int, int, int]]] = {
    "openai/clip-vit-base-patch32": (151.28e6, (224, 32, 768)),
    "openai/clip-vit-base-patch16": (149.62e6, (224, 16, 768)),
    "openai/clip-vit-large-patch14": (427.62e6, (224, 14, 1024)),
    "openai/clip-vit-large-patch14-336": (427.94e6, (336, 14, 1024)),
}
"""Parameters; the picture's side, px, the patch's side, px, and the width of the vision tower."""
VISION_DEFAULTS = {"image_size": 224, "patch_size": 32, "hidden_size": 768}
"""Transformers', for what a config.json leaves out."""
MAX_WAIT_S = 0.005
"""A renderer hands over a batch of pictures within that time."""


class Clip(Reward[Config]):
    """Grades pictures in batches, in a thread of its own."""

    needs = frozenset({"image"})
    reads_thoughts = False
    runs_model = True

    def __init__(self, config: Config, resources: Resources) -> None:
        """Its model on `config.device`, or on the rank's device when that is 'auto'."""
        from rl.rewards.clip.model import ClipModel

        super().__init__(config, resources)
        model = ClipModel(config, resolve_device(config.device, resources.device))
        self._worker = BatchWorker(model.compare, config.batch_size, MAX_WAIT_S, "clip")

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
        known = HUB.get(config.model_path)
        return {} if known is None else {"model": known[0]}

    @classmethod
    def activation_counts(cls, config: Config) -> Mapping[str, float]:
        """Rough. Per picture of the batch its pixels and, in the vision tower, about 12 tensors of
        [patches + 1, width]: a layer's MLP is 4 wide, before and after its non-linearity. Prompts
        come one by one."""
        file = Path(config.model_path) / "config.json"
        if file.is_file():
            stated = json.loads(file.read_text(encoding="utf-8")).get("vision_config") or {}
            side_px, patch_px, width = (
                stated.get(key, default) for key, default in VISION_DEFAULTS.items()
            )
        elif config.model_path in HUB:
            side_px, patch_px, width = HUB[config.model_path][1]
        else:
            return {}
        num_tokens = (side_px // patch_px) ** 2 + 1
        return {"model": config.batch_size * (12.0 * width * num_tokens + 3 * side_px**2)}

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        """Value in [0, 1]; parts `cosine` (-1..1) and `prompt_cut` (1: CLIP read only the prompt's
        beginning). No value when the device's memory is full."""
        if reward_input.image is None:
            return RewardOutput(None, failure="no_image: clip needs a rendered picture")
        started = time.monotonic()
        pair = (reward_input.sample.instruction, reward_input.image)
        found = await asyncio.wrap_future(self._worker.submit(pair))
        if found is None:
            return RewardOutput(
                None, failure="out_of_memory: no room for one picture on CLIP's device"
            )
        cosine, was_cut = found
        value = min(1.0, self.config.scale * max(cosine, 0.0))
        parts = {"cosine": cosine, "prompt_cut": float(was_cut)}
        return RewardOutput(value, parts, seconds=time.monotonic() - started)
