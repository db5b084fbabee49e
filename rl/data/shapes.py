"""Synthetic edits of coloured shapes: the tiny world's data, made on the spot from a seed.

Plug of `rl/data`. What: samples of `rl/tiny_world/scenes.py`. What not: scenes, instructions and
their right descriptions, which are that module's.
"""

from __future__ import annotations

import random
from typing import Annotated, Literal

from pydantic import Field

from rl.config import Section
from rl.types import Sample


class Config(Section):
    """A finite set of scenes; another seed gives other scenes, e.g. held-out ones."""

    type: str
    """This plug's name."""
    num_samples: Annotated[int, Field(ge=1)] = 4096
    """Scenes in the set."""
    seed: int = 0
    """Which set."""


class Shapes:
    """`DataSource` whose sample i depends on (seed, i) alone."""

    num_skipped = 0

    def __init__(self, config: Config) -> None:
        self._config = config

    def __len__(self) -> int:
        return self._config.num_samples

    def __getitem__(self, index: int) -> Sample:
        from rl.tiny_world import scenes

        if not 0 <= index < len(self):
            raise IndexError(index)
        seed = self._config.seed
        rng = random.Random(f"{seed}:{index}")
        scene = scenes.make_scene(rng)
        task = scenes.make_instruction(rng, scene)
        return Sample(
            id=f"shapes-{seed}-{index}",
            instruction=task.instruction,
            source=scenes.draw(scene),
            target=scenes.draw(scenes.apply(scene, task.op)),
            category=task.kind,
            reference=scenes.describe(task.op, scene),
        )


def provides(config: Config) -> frozenset[str]:
    """What samples carry, in the words of a reward's `NEEDS`."""
    return frozenset({"source", "target", "reference"})


def count(config: Config) -> int | None:
    """Samples in the set."""
    return config.num_samples


def check(
    config: Config, on_bad_row: Literal["error", "skip"], max_image_side_px: int
) -> list[str]:
    """Nothing can be wrong."""
    return []


def build(config: Config, on_bad_row: Literal["error", "skip"], max_image_side_px: int) -> Shapes:
    """The set as a `DataSource`."""
    return Shapes(config)
