"""A reward that is only looked at: `type: 'tiny_plugs.glance'`."""

from __future__ import annotations

from rl.api.reward import Reward
from rl.api.types import RewardInput


class Glance(Reward):
    diagnostic = True

    def grade(self, reward_input: RewardInput) -> float:
        return 0.0
