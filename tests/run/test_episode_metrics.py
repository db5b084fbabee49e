"""Metrics of episodes: dead groups, and the rendering noise's share of the reward's variance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_run import episode

from rl.algorithm.metrics import Metrics
from rl.api.types import Completion, Episode, RewardOutput
from rl.config.schema import FinalReward
from rl.ranks.dist import Dist
from rl.rollout.episodes import judge_variance
from rl.rollout.stream import Rollout
from rl.run.episode_metrics import rollout_metrics

SCORED = episode()


def test_a_group_without_any_grade_is_not_dead() -> None:
    groups = [[episode(reward=reward)] * 2 for reward in (None, 0.1, 0.9)]
    metrics = rollout_metrics(Rollout(groups, [None] * 3), Dist())
    assert Metrics.merge([metrics.state()])["groups/dead"] == pytest.approx(1 / 3)


def share(groups: list[list[Episode]]) -> float:
    metrics = rollout_metrics(Rollout(groups, [None] * len(groups)), Dist())
    return Metrics.merge([metrics.state()])["reward/noise_variance_share"]


@pytest.mark.slow
@pytest.mark.parametrize("truth", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("pictures", [(2,) * 8, (8,) * 4, (2, 3, 3, 4)])
def test_the_noise_share_estimates_the_true_share(truth: float, pictures: tuple[int, ...]) -> None:
    generator = np.random.default_rng(0)
    groups = []
    for _ in range(400):
        means = generator.normal(0.5, 0.1 * (1 - truth) ** 0.5, len(pictures))
        pairs = zip(means, pictures, strict=True)
        rows = [generator.normal(mean, 0.1 * truth**0.5, k) for mean, k in pairs]
        groups.append([replace(SCORED, image_rewards=tuple(row.tolist())) for row in rows])
    assert share(groups) == pytest.approx(truth, abs=0.04)


def judged(value: float, judge_variance: float | None, token: int, *more: float) -> Episode:
    variances = (judge_variance,) * (1 + len(more))
    completion = Completion((token,), (0.0,), "stop")
    return replace(
        SCORED, completion=completion, image_rewards=(value, *more), judge_variances=variances
    )


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        # The completions' variance is 0.08, the judge's 0.01 and 0.03: 0.02 / 0.08.
        ([judged(0.2, 0.01, 1), judged(0.6, 0.03, 2)], 0.25),
        ([judged(0.2, 0.01, 1), judged(0.6, 0.03, 2), judged(0.6, 0.03, 2)], 0.25),  # a duplicate
        ([judged(0.2, 0.01, 1), judged(0.6, 0.03, 2), judged(0.9, None, 3)], 0.25),  # one reading
        ([judged(0.5, 0.01, 1), judged(0.51, 0.01, 2)], 1.0),  # by chance below the judge's
        # Two pictures each: within 0.02 and between 0.07 (0.08 - 0.02 / 2).
        ([judged(0.1, 0.009, 1, 0.3), judged(0.5, 0.009, 2, 0.7)], 0.009 / 0.09),
        ([judged(0.2, None, 1), judged(0.6, None, 2)], None),
        ([judged(0.2, 0.01, 1)] * 4, None),
    ],
)
def test_the_judges_share_by_hand(group: list[Episode], expected: float | None) -> None:
    metrics = rollout_metrics(Rollout([group], [None]), Dist())
    found = Metrics.merge([metrics.state()]).get("reward/judge_variance_share")
    assert found == (expected if expected is None else pytest.approx(expected))


A, B = RewardOutput(0.5, replies=("a",), readings=(0.4, 0.6)), RewardOutput(0.2)
ONE_READING = RewardOutput(0.5, replies=("a",))


@pytest.mark.parametrize(
    ("grades", "final", "expected"),
    [
        ({"a": A}, {}, 0.02 / 2),  # variance 0.02 of two readings, and their mean's
        ({"a": A, "b": B}, {}, 0.01 / 4),  # b asks no judge
        ({"a": A, "b": A}, {"weights": {"a": 3, "b": 1}}, 0.01 * (9 + 1) / 16),
        ({"a": A, "b": ONE_READING}, {"weights": {"a": 1, "b": 0}}, 0.01),
        ({"a": A, "b": ONE_READING}, {}, None),
        ({"b": B}, {}, None),
        ({"a": A}, {"weights": {"a/part": 1}}, None),
        ({"a": A, "b": B}, {"op": "geometric_mean"}, None),
    ],
)
def test_the_judges_variance_is_that_of_the_weighted_readings(
    grades: dict[str, RewardOutput], final: dict[str, Any], expected: float | None
) -> None:
    found = judge_variance(grades, FinalReward(**final))
    assert found == (expected if expected is None else pytest.approx(expected))
