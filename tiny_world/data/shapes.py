"""Synthetic edits of coloured shapes: the tiny world's data, made on the spot from a seed.

Data plug. What: samples of `tiny_world/scenes.py`. What not: scenes, instructions and
their right descriptions, which are that module's.
"""

from __future__ import annotations

import random

from rl.api.types import Sample
from tiny_world.data.synthetic import MadeConfig, MadeSource


class Config(MadeConfig):
    """A finite set of scenes; another seed gives other scenes, e.g. held-out ones."""


class Shapes(MadeSource[Config]):
    """Sample i depends on (seed, i) alone."""

    def make(self, index: int) -> Sample:
        from tiny_world import scenes

        seed = self.config.seed
        rng = random.Random(f"{seed}:{index}")
        scene = scenes.make_scene(rng)
        task = scenes.make_instruction(rng, scene)
        return Sample(
            id=f"shapes-{seed}-{index}",
            instruction=task.instruction,
            sources=(scenes.draw(scene),),
            target=scenes.draw(scenes.apply(scene, task.op)),
            category=task.kind,
            reference=scenes.describe(task.op, scene),
        )

    @classmethod
    def provides(cls, config: Config) -> frozenset[str]:
        """What samples carry, in the words of a reward's `needs`."""
        return frozenset({"source", "target", "reference"})
