"""A reward like a judge that does not look."""

from __future__ import annotations

from rl.api.types import RewardInput


def indifferent(reward_input: RewardInput) -> float:
    """Whatever it is shown."""
    return 0.65
