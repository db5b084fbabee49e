"""Generates riddles about one coloured shape; plain captions are the references."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from rl.api.types import Sample
from tiny_world.data.synthetic import SyntheticConfig, SyntheticSource

if TYPE_CHECKING:
    from tiny_world.riddles import Riddle


class ShapeRiddles(SyntheticSource[SyntheticConfig]):
    """Sample i depends only on (held_out, seed, i)."""

    name = "shape-riddles"
    carries = frozenset({"reference"})

    def make(self, index: int) -> Sample:
        from tiny_world import captions, riddles

        def make_one(rng: random.Random) -> tuple[Riddle, bytes]:
            riddle = riddles.make_riddle(rng)
            return riddle, riddle.text.encode()

        riddle = self.draw(index, make_one)
        return Sample(
            id=self.id_of(index),
            instruction=riddle.text,
            category=riddle.shape_noun,
            reference=captions.caption(riddle.wish),
        )
