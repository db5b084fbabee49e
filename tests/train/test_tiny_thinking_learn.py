"""Thinking learns what its twin cannot, and its control learns nothing: the shipped configs,
weights and vLLM.

Bounds are loose, as in test_quickstart_learns.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_shipped import climb, run

from tiny_world.riddles import NUM_CHAINS


@pytest.mark.slow
def test_with_thoughts_it_learns_to_look_up_one_thing_after_another(tmp_path: Path) -> None:
    rows = run("configs/tiny_thinking.jsonnet", tmp_path)
    assert climb(rows) > 0.2
    assert rows[0]["eval/reward"] < 0.5 and rows[-1]["eval/reward"] > 0.65
    assert rows[-1]["eval_reference/reward"] > 0.9


@pytest.mark.slow
def test_the_twin_stays_at_what_one_look_up_is_worth(tmp_path: Path) -> None:
    rows = run("configs/tiny_thinking_twin.jsonnet", tmp_path, "num_iterations=20")
    assert rows[-1]["eval/reward"] < 1 / NUM_CHAINS + 0.15


@pytest.mark.slow
def test_with_shuffled_rewards_no_thought_is_learnt(tmp_path: Path) -> None:
    rows = run("configs/tiny_thinking_control.jsonnet", tmp_path)
    assert abs(climb(rows)) < 0.12
    assert rows[-1]["eval/reward"] < 0.5
