"""Qwen3-VL writes for Qwen-Image-2.1, on the shipped tiny configs and weights: held-out edits get
better with one source picture and with two, and the control's do not.

Bounds are loose: a test must not fail by a seed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_shipped import climb, most_dead_groups, run

pytestmark = pytest.mark.slow


def test_held_out_edits_climb_with_one_picture_and_with_two(tmp_path: Path) -> None:
    rows = run("configs/tiny_qwen_image_21.jsonnet", tmp_path)
    first, last = rows[0], rows[-1]
    assert last["iteration"] == 30
    assert climb(rows) > 0.25
    for measure in ("eval/reward", "eval/reward/borrow"):
        assert first[measure] < 0.5 and last[measure] > 0.7
    # The renderer understands the right words before training and after it.
    assert first["eval_reference/reward"] > 0.8 and last["eval_reference/reward"] > 0.8
    assert most_dead_groups(rows) < 0.3
    assert all(row["mismatch/max_abs_dlogp"] < 1e-3 for row in rows[1:])


def test_with_shuffled_rewards_nothing_is_learnt(tmp_path: Path) -> None:
    rows = run("configs/tiny_qwen_image_21_control.jsonnet", tmp_path, "num_iterations=20")
    assert abs(climb(rows)) < 0.08
    assert rows[-1]["eval/reward"] < 0.5
