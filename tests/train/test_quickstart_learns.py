"""The quickstart learns, and its control does not: the shipped configs, weights, vLLM and judge.

Bounds are looser than the worst of the seeds in benchmarks/results/seeds.md: a test must not fail
by a seed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_shipped import climb, most_dead_groups, run


@pytest.mark.slow
def test_quickstart_climbs_on_held_out_scenes(tmp_path: Path) -> None:
    rows = run("configs/quickstart.jsonnet", tmp_path)
    first, last = rows[0], rows[-1]
    assert last["iteration"] == 40
    assert climb(rows) > 0.4
    assert first["eval/reward"] < 0.4 and last["eval/reward"] > 0.9
    # The renderer understands the right words before training and after it.
    assert first["eval_reference/reward"] > 0.95 and last["eval_reference/reward"] > 0.95
    assert last["eval/reference_match"] > 0.75
    assert most_dead_groups(rows) < 0.25
    assert all(row["mismatch/max_abs_dlogp"] < 1e-3 for row in rows[1:])


@pytest.mark.slow
def test_with_shuffled_rewards_nothing_is_learnt(tmp_path: Path) -> None:
    rows = run("configs/quickstart_control.jsonnet", tmp_path)
    assert abs(climb(rows)) < 0.06
    assert rows[-1]["eval/reward"] < 0.5
