"""Users' prompts for pictures of one coloured shape, in an order that a seed decides.

Those of `tiny_world/captions.py`, each with the plain caption that the tiny Stable Diffusion 3
understands as its reference.
"""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING

from rl.api.types import Sample
from tiny_world.data.synthetic import MadeConfig, MadeSource

if TYPE_CHECKING:
    from tiny_world.captions import UserPrompt


class Config(MadeConfig):
    """A finite list of prompts: the world's prompts, shuffled anew each time they run out. The 72
    held-out ones are those whose colour and shape never come together in the other 216."""


class ShapePrompts(MadeSource[Config]):
    """Sample i depends on (held_out, seed, i) alone."""

    name = "shape-prompts"
    carries = frozenset({"reference"})

    def make(self, index: int) -> Sample:
        from tiny_world import captions

        config = self.config
        turn, place = divmod(index, len(_shuffled(config.held_out, config.seed, 0)))
        prompt = _shuffled(config.held_out, config.seed, turn)[place]
        return Sample(
            id=self.id_of(index),
            instruction=prompt.text,
            category=prompt.kind,
            reference=captions.caption(prompt.wish),
        )


@functools.lru_cache(maxsize=64)
def _shuffled(held_out: bool, seed: int, turn: int) -> tuple[UserPrompt, ...]:
    from tiny_world.captions import user_prompts

    prompts = user_prompts(held_out)
    random.Random(f"{seed}:{turn}").shuffle(prompts)
    return tuple(prompts)
