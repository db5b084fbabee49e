"""Generates edits of one source picture, or of two, where the second shows the colour to use."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from rl.api.types import Sample
from tiny_world.data.synthetic import SyntheticConfig, SyntheticSource, is_held_out

if TYPE_CHECKING:
    from tiny_world.scenes import Scene, Task


class Config(SyntheticConfig):
    """Settings of a finite set of samples, which depends on the seed."""

    share_pairs: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of samples with two pictures, 0 to 1; the first picture is the one to edit."""


class ShapePairs(SyntheticSource[Config]):
    """Sample i depends only on (held_out, seed, share_pairs, i). Both pictures of a held-out sample
    are held out."""

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

        def make_one(rng: random.Random) -> tuple[tuple[list[Scene], Task], bytes]:
            scene = scenes.make_scene(rng)
            if rng.random() < config.share_pairs:
                sources = [scene, lender(rng)]
                task = scenes.make_borrowing(rng, *sources)
            else:
                sources, task = [scene], scenes.make_instruction(rng, scene)
            return (sources, task), scenes.draw_array(scene).tobytes()

        sources, task = self.draw(index, make_one)
        return Sample(
            id=self.id_of(index),
            instruction=task.instruction,
            sources=tuple(scenes.draw(scene) for scene in sources),
            target=scenes.draw(scenes.apply(sources[0], task.op)),
            category=task.kind,
            reference=scenes.describe(task.op, sources[0]),
        )
