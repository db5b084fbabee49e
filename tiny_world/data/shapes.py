"""Generates edits of coloured shapes (`tiny_world/scenes.py`) from a seed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from rl.api.types import Sample
from tiny_world.data.synthetic import SyntheticConfig, SyntheticSource

if TYPE_CHECKING:
    from tiny_world.scenes import Scene, Task


class Shapes(SyntheticSource[SyntheticConfig]):
    """Sample i depends only on (held_out, seed, i)."""

    name = "shapes"
    carries = frozenset({"source", "target", "reference"})

    def make(self, index: int) -> Sample:
        from tiny_world import scenes

        def make_one(rng: random.Random) -> tuple[tuple[Scene, Task], bytes]:
            scene = scenes.make_scene(rng)
            task = scenes.make_instruction(rng, scene)
            return (scene, task), scenes.draw_array(scene).tobytes()

        scene, task = self.draw(index, make_one)
        return Sample(
            id=self.id_of(index),
            instruction=task.instruction,
            sources=(scenes.draw(scene),),
            target=scenes.draw(scenes.apply(scene, task.op)),
            category=task.kind,
            reference=scenes.describe(task.op, scene),
        )
