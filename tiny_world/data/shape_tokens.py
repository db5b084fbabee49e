"""Synthetic edits of coloured shapes as codes: the tiny Emu3's data, made on the spot from a seed.

Data plug. What: samples of `tiny_world/token_scenes.py`, pictures as codebook indices
only (the renderer `emu3_vq` draws them for rewards and records). What not: scenes and their codes,
which are that module's.
"""

from __future__ import annotations

import random

from rl.api.types import Sample
from tiny_world.data.synthetic import MadeConfig, MadeSource


class Config(MadeConfig):
    """A finite set of scenes; another seed gives other scenes, e.g. held-out ones."""


class ShapeTokens(MadeSource[Config]):
    """Sample i depends on (seed, i) alone."""

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

    @classmethod
    def provides(cls, config: Config) -> frozenset[str]:
        """What samples carry, in the words of a reward's `needs`, once the codes are drawn."""
        return frozenset({"source_codes", "target_codes", "source", "target"})
