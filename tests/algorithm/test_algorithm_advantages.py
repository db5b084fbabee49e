"""Group-relative advantages against numbers computed by hand."""

import math

import pytest

from rl.algorithm.grpo import RewardMoments, group_advantages, reward_moments


def test_group_std_advantages_by_hand() -> None:
    # mean 0.5; deviations -0.3, 0.1, 0.2; population variance (0.09 + 0.01 + 0.04) / 3
    result = group_advantages([0.2, 0.6, 0.7], "group_std", eps=0.01)
    std = math.sqrt(0.14 / 3)
    expected = [-0.3 / (std + 0.01), 0.1 / (std + 0.01), 0.2 / (std + 0.01)]
    assert result == pytest.approx(expected, abs=1e-12)


def test_scale_none_only_subtracts_the_mean() -> None:
    result = group_advantages([0.0, 1.0, 0.5, 0.5], "none", eps=123.0)
    assert result == pytest.approx([-0.5, 0.5, 0.0, 0.0], abs=1e-12)


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


def test_ungraded_completions_do_not_enter_the_baseline() -> None:
    first, *middle, last = group_advantages([None, 0.2, 0.4, None], "none", eps=0.0)
    assert first is None and last is None
    assert middle == pytest.approx([-0.1, 0.1], abs=1e-12)


@pytest.mark.parametrize(
    "rewards_G", [[None, 0.8, None], [None, None], [0.3, 0.3, 0.3], [0.3, 0.3 + 1e-9]]
)
def test_a_group_without_reward_spread_gets_advantage_zero(rewards_G: list[float | None]) -> None:
    result = group_advantages(rewards_G, "group_std", eps=1e-4)
    assert result == [None if r is None else 0.0 for r in rewards_G]
