"""Edits of coloured shapes as codes: samples of `tiny_world/token_scenes.py`, for the tiny Emu3.

Pictures are codebook indices only; the renderer `emu3_vq` draws them for rewards and records.
"""

from __future__ import annotations

import random

from rl.api.types import Sample
from tiny_world.data.synthetic import MadeConfig, MadeSource


class ShapeTokens(MadeSource[MadeConfig]):
    """Sample i depends on (seed, i) alone."""

    carries = frozenset({"source_codes", "target_codes", "source", "target"})

    def make(self, index: int) -> Sample:
        from tiny_world import scenes, token_scenes

        seed = self.config.seed
        rng = random.Random(f"{seed}:{index}")
        scene = token_scenes.make_centred_scene(rng)
        task = scenes.make_instruction(rng, scene)
        return Sample(
            id=f"shape-tokens-{seed}-{index}",
            instruction=task.instruction,
            source_codes=token_scenes.encode(scene),
            target_codes=token_scenes.encode(scenes.apply(scene, task.op)),
            category=task.kind,
        )
