"""Edits of coloured shapes as codes: samples of `tiny_world/token_scenes.py`, for the tiny Emu3.

Pictures are codebook indices only; the renderer `emu3_vq` draws them for rewards and records.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from rl.api.types import Sample
from tiny_world.data.synthetic import MadeConfig, MadeSource

if TYPE_CHECKING:
    from tiny_world.scenes import Scene, Task


class ShapeTokens(MadeSource[MadeConfig]):
    """Sample i depends on (held_out, seed, i) alone."""

    name = "shape-tokens"
    carries = frozenset({"source_codes", "target_codes", "source", "target"})

    def make(self, index: int) -> Sample:
        from tiny_world import scenes, token_scenes

        def made(rng: random.Random) -> tuple[tuple[Scene, Task], bytes]:
            scene = token_scenes.make_centred_scene(rng)
            task = scenes.make_instruction(rng, scene)
            return (scene, task), token_scenes.encode(scene).tobytes()

        scene, task = self.draw(index, made)
        return Sample(
            id=self.id_of(index),
            instruction=task.instruction,
            source_codes=token_scenes.encode(scene),
            target_codes=token_scenes.encode(scenes.apply(scene, task.op)),
            category=task.kind,
        )
