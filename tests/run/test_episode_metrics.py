"""Metrics of episodes: dead groups."""

from __future__ import annotations

import pytest
from tiny_run import episode

from rl.algorithm.metrics import Metrics
from rl.ranks.dist import Dist
from rl.rollout.stream import Rollout
from rl.run.episode_metrics import rollout_metrics


def test_a_group_without_any_grade_is_not_dead() -> None:
    groups = [[episode(reward=reward)] * 2 for reward in (None, 0.1, 0.9)]
    metrics = rollout_metrics(Rollout(groups, [None] * 3), Dist())
    assert Metrics.merge([metrics.state()])["groups/dead"] == pytest.approx(1 / 3)
