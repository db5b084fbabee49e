"""The rendering noise's share of the reward's variance, against known variances."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny_run import episode

from rl.algorithm.metrics import Metrics
from rl.api.types import Episode
from rl.ranks.dist import Dist
from rl.rollout.stream import Rollout
from rl.run.episode_metrics import rollout_metrics

SCORED = episode()


def test_a_group_that_nobody_graded_is_not_dead() -> None:
    groups = [[episode(reward=reward)] * 2 for reward in (None, 0.1, 0.9)]
    metrics = rollout_metrics(Rollout(groups, [None] * 3), Dist())
    assert Metrics.merge([metrics.state()])["groups/dead"] == pytest.approx(1 / 3)


def share(groups: list[list[Episode]]) -> float:
    metrics = rollout_metrics(Rollout(groups, [None] * len(groups)), Dist())
    return Metrics.merge([metrics.state()])["reward/noise_variance_share"]


@pytest.mark.parametrize("truth", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("pictures", [(2,) * 8, (8,) * 4, (2, 3, 3, 4)])
def test_the_noise_share_is_the_true_one(truth: float, pictures: tuple[int, ...]) -> None:
    draw = np.random.default_rng(0)
    groups = []
    for _ in range(400):
        words = draw.normal(0.5, 0.1 * (1 - truth) ** 0.5, len(pictures))
        rows = [
            draw.normal(word, 0.1 * truth**0.5, k) for word, k in zip(words, pictures, strict=True)
        ]
        groups.append([replace(SCORED, image_rewards=tuple(row.tolist())) for row in rows])
    assert share(groups) == pytest.approx(truth, abs=0.04)
