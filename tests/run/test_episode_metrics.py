"""Metrics of episodes: dead groups, and the rendering noise's share of the reward's variance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny_run import episode

from rl.api.types import Episode
from rl.ranks.dist import Dist
from rl.rollout.stream import Rollout
from rl.run.episode_metrics import rollout_metrics

SCORED = episode()


def test_a_group_without_any_grade_is_not_dead() -> None:
    groups = [[episode(reward=reward)] * 2 for reward in (None, 0.1, 0.9)]
    assert metrics_of(groups)["groups/dead"] == pytest.approx(1 / 3)


def metrics_of(groups: list[list[Episode]]) -> dict[str, float]:
    return Dist().reduce(rollout_metrics(Rollout(groups, [None] * len(groups)), Dist()))


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
    assert metrics_of(groups)["reward/noise_variance_share"] == pytest.approx(truth, abs=0.04)
