"""Edits of coloured shapes with one source picture and with two: "give the square the color of the
circle in picture 2". Samples of `tiny_world/scenes.py`, made on the spot from a seed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from rl.api.types import Sample
from tiny_world.data.synthetic import MadeConfig, MadeSource, is_held_out

if TYPE_CHECKING:
    from tiny_world.scenes import Scene, Task


class Config(MadeConfig):
    """A finite set; another seed gives another one."""

    share_pairs: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Of the samples, 0 to 1, those that show two pictures; the first is the one to be edited."""


class ShapePairs(MadeSource[Config]):
    """Sample i depends on (held_out, seed, share_pairs, i) alone. Both pictures of a held-out
    sample are of the held-out half."""

    name = "shape-pairs"
    carries = frozenset({"source", "target", "reference"})

    def make(self, index: int) -> Sample:
        from tiny_world import scenes

        config = self.config

        def lender(rng: random.Random) -> Scene:
            while True:
                scene = scenes.make_scene(rng)
                if is_held_out(scenes.draw_array(scene).tobytes()) == config.held_out:
                    return scene

        def made(rng: random.Random) -> tuple[tuple[list[Scene], Task], bytes]:
            scene = scenes.make_scene(rng)
            if rng.random() < config.share_pairs:
                shown = [scene, lender(rng)]
                task = scenes.make_borrowing(rng, *shown)
            else:
                shown, task = [scene], scenes.make_instruction(rng, scene)
            return (shown, task), scenes.draw_array(scene).tobytes()

        shown, task = self.draw(index, made)
        return Sample(
            id=self.id_of(index),
            instruction=task.instruction,
            sources=tuple(scenes.draw(scene) for scene in shown),
            target=scenes.draw(scenes.apply(shown[0], task.op)),
            category=task.kind,
            reference=scenes.describe(task.op, shown[0]),
        )
