"""The prompts of `tiny_world/captions.py` in random order; plain captions are the references."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING

from rl.api.types import Sample
from tiny_world.data.synthetic import SyntheticConfig, SyntheticSource

if TYPE_CHECKING:
    from tiny_world.captions import UserPrompt


class Config(SyntheticConfig):
    """A finite list of prompts, shuffled again after each pass. The 72 held-out prompts have pairs
    of colour and shape that none of the 216 training prompts has."""


class ShapePrompts(SyntheticSource[Config]):
    """Sample i depends only on (held_out, seed, i)."""

    name = "shape-prompts"
    carries = frozenset({"reference"})

    def make(self, index: int) -> Sample:
        from tiny_world import captions

        config = self.config
        epoch, position = divmod(index, len(_shuffled(config.held_out, config.seed, 0)))
        prompt = _shuffled(config.held_out, config.seed, epoch)[position]
        return Sample(
            id=self.id_of(index),
            instruction=prompt.text,
            category=prompt.kind,
            reference=captions.caption(prompt.wish),
        )


@functools.lru_cache(maxsize=64)
def _shuffled(held_out: bool, seed: int, epoch: int) -> tuple[UserPrompt, ...]:
    from tiny_world.captions import user_prompts

    prompts = user_prompts(held_out)
    random.Random(f"{seed}:{epoch}").shuffle(prompts)
    return tuple(prompts)
