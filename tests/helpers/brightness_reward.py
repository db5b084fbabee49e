"""A user's reward, named in the config by its dotted path: the brightness of the picture."""

from __future__ import annotations

import numpy as np

from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput


class Brightness(Reward):
    """Continuous, so that random models can improve it."""

    needs = frozenset({"image"})

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        level = float(np.asarray(reward_input.image, dtype=np.float64).mean() / 255)
        return RewardOutput(value=level, parts={"level": level})
