"""A user's own reward, named in the config by its dotted path: how bright the picture is."""

from __future__ import annotations

import numpy as np

from rl.api.types import RewardInput, RewardOutput
from rl.config.schema import Section

NEEDS = frozenset({"image"})
NEEDS_JUDGE = False


class Config(Section):
    """No knobs."""

    type: str
    """'tests.brightness_reward'."""


class Brightness:
    """Continuous, so that random models have something to climb."""

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        level = float(np.asarray(reward_input.image, dtype=np.float64).mean() / 255)
        return RewardOutput(value=level, parts={"level": level})


def build(config: Config, judge: object, device: object) -> Brightness:
    return Brightness()
