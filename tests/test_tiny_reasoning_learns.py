"""Reasoning at tiny size, the shipped configs and weights: it learns, its control does not, and a
killed run goes on exactly where a straight one would be.

Bounds are loose: a test must not fail by a seed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_loop
from test_quickstart_learns import climb, run
from test_train_resume import assert_same_run, metrics_of

pytestmark = pytest.mark.slow

CONFIG = "configs/tiny_reasoning.jsonnet"


def test_right_answers_climb_on_held_out_questions(tmp_path: Path) -> None:
    rows = run(CONFIG, tmp_path)
    first, last = rows[0], rows[-1]
    assert last["iteration"] == 60
    assert climb(rows) > 0.2
    assert first["eval/part/accuracy"] < 0.55 and last["eval/part/accuracy"] > 0.75
    assert last["eval/part/format"] > 0.95
    assert all(row["mismatch/max_abs_dlogp"] < 1e-3 for row in rows[1:])


def test_with_shuffled_rewards_nothing_is_learnt(tmp_path: Path) -> None:
    rows = run("configs/tiny_reasoning_control.jsonnet", tmp_path)
    assert abs(climb(rows)) < 0.06


def test_kill_9_and_resume_equals_straight_through(tmp_path: Path) -> None:
    changes = """{
      run_name: 'tiny', base_exp_dir: '%s', num_iterations: 4,
      prompts_per_iteration: 4, generations_per_prompt: 4,
      optimizer+: { warmup_iterations: 1 },
      evaluation+: { every_n_iterations: 2, num_samples: 6 },
      checkpoint+: { save_every_n_iterations: 1 },
    }"""
    for name in ("straight", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        path = folder / "config.jsonnet"
        path.write_text(f"(import '{tiny_loop.REPO / CONFIG}') + " + changes % folder)
        if name == "killed":
            killed = tiny_loop.run(path, "rl.learner:Learner.update", "3", check=False)
            assert killed.returncode == -9, killed.stderr[-2000:]
        tiny_loop.run(path)
    straight, resumed = tmp_path / "straight" / "tiny", tmp_path / "killed" / "tiny"
    assert_same_run(straight, resumed)
    assert any(row["optimizer/grad_norm"] > 0 for row in metrics_of(straight)[1:])
