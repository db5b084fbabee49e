"""Rewards of a group -> how much better than its siblings each completion was.

Axes: `_P` prompts (groups), `_G` completions in a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

AdvantageScale = Literal["none", "group_std", "batch_std"]

SPREAD_TOLERANCE = 1e-6
"""Rewards closer than this (0..1 units) are equal: float noise of averaged scores is no signal."""


@dataclass(frozen=True)
class RewardMoments:
    """Power sums of graded rewards; add them up over ranks for the whole batch's spread."""

    total: float
    """Sum of rewards."""
    total_of_squares: float
    """Sum of squared rewards."""
    count: float
    """Number of graded completions."""

    @property
    def std(self) -> float:
        """Population standard deviation; 0 for an empty batch."""
        if self.count == 0:
            return 0.0
        mean = self.total / self.count
        return math.sqrt(max(0.0, self.total_of_squares / self.count - mean * mean))


def reward_moments(rewards_PG: Sequence[Sequence[float | None]]) -> RewardMoments:
    """Power sums of this rank's graded rewards (None is skipped)."""
    graded = [reward for rewards_G in rewards_PG for reward in rewards_G if reward is not None]
    return RewardMoments(math.fsum(graded), math.fsum(r * r for r in graded), len(graded))


def group_advantages(
    rewards_G: Sequence[float | None],
    scale: AdvantageScale,
    eps: float,
    batch: RewardMoments | None = None,
) -> list[float | None]:
    """[G] A = (r - mean(r)) / s, with s = 1 | std(r) + eps | std_batch(r) + eps.

    group_std: GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2); none: Dr. GRPO (Liu et al.
    2025, arXiv 2503.20783); batch_std: group mean, batch deviation (LitePPO, Liu et al. 2025,
    arXiv 2508.08221). Deviations are population deviations over graded members. A group with fewer
    than two of these, or without spread, moves nothing: 0 throughout.

    Args:
        rewards_G: in [0, 1]; None = ungraded, out of mean and deviation, and None again.
        eps: added to the deviation, reward units.
        batch: moments over ALL ranks, for batch_std (`reward_moments`, summed).
    """
    graded = [reward for reward in rewards_G if reward is not None]
    if len(graded) < 2 or max(graded) - min(graded) <= SPREAD_TOLERANCE:
        return [None if reward is None else 0.0 for reward in rewards_G]
    mean = math.fsum(graded) / len(graded)
    divisor = 1.0
    if scale == "group_std":
        divisor = math.sqrt(math.fsum((r - mean) ** 2 for r in graded) / len(graded)) + eps
    elif scale == "batch_std":
        assert batch is not None, "its moments are known with the last group"
        divisor = batch.std + eps
    return [None if r is None else (r - mean) / divisor for r in rewards_G]
