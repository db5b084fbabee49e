"""Group-relative advantages against numbers computed by hand."""

import math

import pytest

from rl.algorithm.grpo import RewardMoments, group_advantages, reward_moments

STD = math.sqrt(0.14 / 3)
"""Of 0.2, 0.6 and 0.7: mean 0.5, population variance (0.09 + 0.01 + 0.04) / 3."""


@pytest.mark.parametrize(
    ("rewards_G", "scale", "eps", "expected"),
    [
        ([0.2, 0.6, 0.7], "group_std", 0.01, [x / (STD + 0.01) for x in (-0.3, 0.1, 0.2)]),
        ([0.0, 1.0, 0.5, 0.5], "none", 123.0, [-0.5, 0.5, 0.0, 0.0]),
        # Ungraded completions do not enter the baseline.
        ([None, 0.2, 0.4, None], "none", 0.0, [None, -0.1, 0.1, None]),
        # A group without reward spread gets advantage zero.
        ([None, 0.8, None], "group_std", 1e-4, [None, 0.0, None]),
        ([None, None], "group_std", 1e-4, [None, None]),
        ([0.3, 0.3, 0.3], "group_std", 1e-4, [0.0, 0.0, 0.0]),
        ([0.3, 0.3 + 1e-9], "group_std", 1e-4, [0.0, 0.0]),
    ],
)
def test_advantages_of_a_group_by_hand(
    rewards_G: list[float | None], scale: str, eps: float, expected: list[float | None]
) -> None:
    assert group_advantages(rewards_G, scale, eps) == pytest.approx(expected, abs=1e-12)


def test_batch_std_divides_every_group_by_the_same_number() -> None:
    rewards_PG = [[0.0, 1.0], [0.4, 0.6]]
    # All four: mean 0.5, variance (0.25 + 0.25 + 0.01 + 0.01) / 4 = 0.13
    batch = reward_moments(rewards_PG)
    first, second = (group_advantages(row, "batch_std", 0.0, batch) for row in rewards_PG)
    std = math.sqrt(0.13)
    assert first == pytest.approx([-0.5 / std, 0.5 / std], abs=1e-12)
    assert second == pytest.approx([-0.1 / std, 0.1 / std], abs=1e-12)


def test_moments_of_two_ranks_add_up_to_the_whole_batch() -> None:
    whole = reward_moments([[0.1, 0.9], [0.3, None], [0.7, 0.2]])
    parts = [reward_moments([[0.1, 0.9]]), reward_moments([[0.3, None], [0.7, 0.2]])]
    summed = RewardMoments(
        sum(m.total for m in parts),
        sum(m.total_of_squares for m in parts),
        sum(m.count for m in parts),
    )
    assert summed.count == whole.count == 5
    assert summed.std == pytest.approx(whole.std, abs=1e-12)
    mean = 2.2 / 5
    variance = sum((r - mean) ** 2 for r in (0.1, 0.9, 0.3, 0.7, 0.2)) / 5
    assert whole.std == pytest.approx(math.sqrt(variance), abs=1e-12)
