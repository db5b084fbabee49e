"""Prompt enhancement learns, and its control does not: the shipped config, weights and vLLM.

Bounds are loose, as in test_quickstart_learns.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_shipped import climb, most_dead_groups, run


@pytest.mark.slow
def test_the_rewriter_learns_to_say_what_the_renderer_understands(tmp_path: Path) -> None:
    rows = run("configs/tiny_prompts.jsonnet", tmp_path)
    first, last = rows[0], rows[-1]
    assert climb(rows) > 0.2
    assert first["eval/reward"] < 0.65 and last["eval/reward"] > 0.85
    assert most_dead_groups(rows) < 0.25
    # The renderer is frozen and reads words: the right ones are worth the same before and after.
    assert first["eval_reference/reward"] == pytest.approx(last["eval_reference/reward"], abs=0.02)
    assert last["eval_reference/reward"] > 0.85
    assert last["eval/reference_match"] > 0.7
    assert all(row["mismatch/max_abs_dlogp"] < 1e-3 for row in rows[1:])


@pytest.mark.slow
def test_with_shuffled_rewards_no_rewriting_is_learnt(tmp_path: Path) -> None:
    rows = run("configs/tiny_prompts_control.jsonnet", tmp_path)
    assert abs(climb(rows)) < 0.08
    assert rows[-1]["eval/reward"] < 0.65
