"""Synthetic edits of coloured shapes as codes: the tiny Emu3's data, made on the spot from a seed.

Data plug. What: samples of `tiny_world/token_scenes.py`, pictures as codebook indices
only (the renderer `emu3_vq` draws them for rewards and records). What not: scenes and their codes,
which are that module's.
"""

from __future__ import annotations

import random
from typing import Literal

from rl.api.types import Sample
from tiny_world.data.synthetic import MadeConfig, MadeSource
from tiny_world.data.synthetic import check as check
from tiny_world.data.synthetic import count as count


class Config(MadeConfig):
    """A finite set of scenes; another seed gives other scenes, e.g. held-out ones."""


class ShapeTokens(MadeSource[Config]):
    """`DataSource` whose sample i depends on (seed, i) alone."""

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


def provides(config: Config) -> frozenset[str]:
    """What samples carry, in the words of a reward's `NEEDS`, once the renderer drew the codes."""
    return frozenset({"source_codes", "target_codes", "source", "target"})


def build(
    config: Config, on_bad_row: Literal["error", "skip"], max_image_side_px: int
) -> ShapeTokens:
    """The set as a `DataSource`."""
    return ShapeTokens(config)
