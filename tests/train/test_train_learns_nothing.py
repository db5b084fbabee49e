"""A whole run under a reward that is always the same: it goes on, ends well, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_loop


@pytest.mark.slow
def test_a_run_that_learns_nothing_says_so_and_ends_well(tmp_path: Path) -> None:
    models = tiny_loop.save_models(tmp_path / "models")
    config = tiny_loop.config_of(
        models,
        tmp_path,
        rewards={"mine": {"type": "tests.indifferent_reward.indifferent"}},
        final_reward={},
        judge={},
        algorithm={"kl_coeff": 0.0},
        evaluation={"every_n_iterations": 0},
        checkpoint={"save_every_n_iterations": 50},
        num_iterations=5,
    )
    ended = tiny_loop.run_forked(tiny_loop.write_config(tmp_path, config))
    said = [line for line in ended.stderr.split("\n") if line.startswith("WARNING: ")]
    told = {
        "rewards.mine: 0.65 for each of the 30 completions of the last 3 iterations": 1,
        "100% of the groups of the last 3 iterations have no spread": 1,
        "no optimiser step in the last 3 iterations": 1,
        "the run ends without an optimiser step: none of the 5 iterations": 1,
    }
    assert {text: sum(text in line for line in said) for text in told} == told, ended.stderr[-3000:]
    assert ended.stdout.count("NO STEP") == 5
    rows = tiny_loop.metrics_of(tmp_path / "tiny")[1:]
    assert [row["reward/range/mine"] for row in rows] == [0.0] * 5
    assert [row["optimizer/steps"] for row in rows] == [0] * 5
