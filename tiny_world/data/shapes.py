"""Edits of coloured shapes: samples of `tiny_world/scenes.py`, made on the spot from a seed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from rl.api.types import Sample
from tiny_world.data.synthetic import MadeConfig, MadeSource

if TYPE_CHECKING:
    from tiny_world.scenes import Scene, Task


class Shapes(MadeSource[MadeConfig]):
    """Sample i depends on (held_out, seed, i) alone."""

    name = "shapes"
    carries = frozenset({"source", "target", "reference"})

    def make(self, index: int) -> Sample:
        from tiny_world import scenes

        def made(rng: random.Random) -> tuple[tuple[Scene, Task], bytes]:
            scene = scenes.make_scene(rng)
            task = scenes.make_instruction(rng, scene)
            return (scene, task), scenes.draw_array(scene).tobytes()

        scene, task = self.draw(index, made)
        return Sample(
            id=self.id_of(index),
            instruction=task.instruction,
            sources=(scenes.draw(scene),),
            target=scenes.draw(scenes.apply(scene, task.op)),
            category=task.kind,
            reference=scenes.describe(task.op, scene),
        )
