"""Edits of coloured shapes: samples of `tiny_world/scenes.py`, made on the spot from a seed."""

from __future__ import annotations

import random

from rl.api.types import Sample
from tiny_world.data.synthetic import MadeConfig, MadeSource


class Shapes(MadeSource[MadeConfig]):
    """Sample i depends on (seed, i) alone."""

    carries = frozenset({"source", "target", "reference"})

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
