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


@dataclass(frozen=True)
class GroupAdvantages:
    """What became of a batch of groups."""

    advantages: list[list[float | None]]
    """[P][G]; None where the reward was None, 0 throughout a group without signal."""
    num_graded: list[int]
    """[P] graded completions per group."""
    has_signal: list[bool]
    """[P] False: fewer than two graded completions, or no spread; such a group moves nothing."""


def reward_moments(rewards_PG: Sequence[Sequence[float | None]]) -> RewardMoments:
    """Power sums of this rank's graded rewards (None is skipped)."""
    graded = [reward for rewards_G in rewards_PG for reward in rewards_G if reward is not None]
    return RewardMoments(math.fsum(graded), math.fsum(r * r for r in graded), len(graded))


def group_advantages(
    rewards_PG: Sequence[Sequence[float | None]],
    scale: AdvantageScale,
    eps: float,
    batch: RewardMoments | None = None,
) -> GroupAdvantages:
    """A = (r - mean_group(r)) / s, with s = 1 | std_group(r) + eps | std_batch(r) + eps.

    group_std: GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2); none: Dr. GRPO (Liu et al.
    2025, arXiv 2503.20783); batch_std: group mean, batch deviation (LitePPO, Liu et al. 2025,
    arXiv 2508.08221). Deviations are population deviations over graded members.

    Args:
        rewards_PG: [P][G] in [0, 1]; None = ungraded, out of mean and deviation.
        scale: see above.
        eps: added to the deviation, reward units.
        batch: moments over ALL ranks, needed for batch_std only (`reward_moments`, summed).

    Raises ValueError when batch_std comes without `batch`.
    """
    if scale == "batch_std" and batch is None:
        raise ValueError("advantage_scale 'batch_std' needs the reward moments of the whole batch")
    advantages_PG: list[list[float | None]] = []
    num_graded_P: list[int] = []
    has_signal_P: list[bool] = []
    for rewards_G in rewards_PG:
        graded = [reward for reward in rewards_G if reward is not None]
        signal = len(graded) > 1 and max(graded) - min(graded) > SPREAD_TOLERANCE
        num_graded_P.append(len(graded))
        has_signal_P.append(signal)
        if not signal:
            advantages_PG.append([None if reward is None else 0.0 for reward in rewards_G])
            continue
        mean = math.fsum(graded) / len(graded)
        divisor = _divisor(graded, mean, scale, eps, batch)
        advantages_PG.append([None if r is None else (r - mean) / divisor for r in rewards_G])
    return GroupAdvantages(advantages_PG, num_graded_P, has_signal_P)


def _divisor(
    graded: Sequence[float],
    mean: float,
    scale: AdvantageScale,
    eps: float,
    batch: RewardMoments | None,
) -> float:
    if scale == "none":
        return 1.0
    if scale == "batch_std":
        assert batch is not None
        return batch.std + eps
    return math.sqrt(math.fsum((r - mean) ** 2 for r in graded) / len(graded)) + eps
