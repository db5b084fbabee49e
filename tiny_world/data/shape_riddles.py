"""Riddles about one coloured shape: prompts of `tiny_world/riddles.py`, made on the spot from a
seed, each with the plain caption that the tiny Stable Diffusion 3 understands as its reference.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from rl.api.types import Sample
from tiny_world.data.synthetic import MadeConfig, MadeSource

if TYPE_CHECKING:
    from tiny_world.riddles import Riddle


class ShapeRiddles(MadeSource[MadeConfig]):
    """Sample i depends on (held_out, seed, i) alone."""

    name = "shape-riddles"
    carries = frozenset({"reference"})

    def make(self, index: int) -> Sample:
        from tiny_world import captions, riddles

        def made(rng: random.Random) -> tuple[Riddle, bytes]:
            riddle = riddles.make_riddle(rng)
            return riddle, riddle.text.encode()

        riddle = self.draw(index, made)
        return Sample(
            id=self.id_of(index),
            instruction=riddle.text,
            category=riddle.shape_noun,
            reference=captions.caption(riddle.wish),
        )
