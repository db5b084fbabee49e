"""A tiny Emu3 learns to edit pictures as codes, and its control does not: the shipped configs and
weights, constrained sampling in vLLM, the VQ decoder, the tiny world's judge.

Bounds are loose, as in test_quickstart_learns.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_shipped import climb, most_dead_groups, run

pytestmark = pytest.mark.slow


def test_reward_climbs_on_held_out_scenes(tmp_path: Path) -> None:
    rows = run("configs/tiny_earl.jsonnet", tmp_path)
    first, last = rows[0], rows[-1]
    assert last["iteration"] == 50
    assert climb(rows) > 0.35
    assert first["eval/reward"] < 0.4 and last["eval/reward"] > 0.78
    assert most_dead_groups(rows) < 0.25
    # The constraint keeps every picture whole, whatever the weights.
    assert all(row["status/policy_failed"] == 0 for row in rows[1:])
    assert all(row["mismatch/max_abs_dlogp"] < 1e-3 for row in rows[1:])


def test_with_shuffled_rewards_nothing_is_learnt(tmp_path: Path) -> None:
    rows = run("configs/tiny_earl_control.jsonnet", tmp_path)
    assert abs(climb(rows)) < 0.08
    assert rows[-1]["eval/reward"] < 0.45
