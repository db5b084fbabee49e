"""Generates edits of coloured shapes as codes (`tiny_world/token_scenes.py`) for the tiny Emu3."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from rl.api.types import Sample
from tiny_world.data.synthetic import SyntheticConfig, SyntheticSource

if TYPE_CHECKING:
    from tiny_world.scenes import Scene, Task


class ShapeTokens(SyntheticSource[SyntheticConfig]):
    """Sample i depends only on (held_out, seed, i). It has codes but no pictures; the renderer
    `emu3_vq` draws them for rewards and records."""

    name = "shape-tokens"
    carries = frozenset({"source_codes", "target_codes", "source", "target"})

    def make(self, index: int) -> Sample:
        from tiny_world import scenes, token_scenes

        def make_one(rng: random.Random) -> tuple[tuple[Scene, Task], bytes]:
            scene = token_scenes.make_centred_scene(rng)
            task = scenes.make_instruction(rng, scene)
            return (scene, task), token_scenes.encode(scene).tobytes()

        scene, task = self.draw(index, make_one)
        return Sample(
            id=self.id_of(index),
            instruction=task.instruction,
            source_codes=token_scenes.encode(scene),
            target_codes=token_scenes.encode(scenes.apply(scene, task.op)),
            category=task.kind,
        )
