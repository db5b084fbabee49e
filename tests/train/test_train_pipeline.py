"""With `max_staleness: 1` the next iteration is rolled out while the judge grades the last one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_loop
from tiny_loop import assert_same_run, metrics_of

pytestmark = pytest.mark.slow


def stale_config(models: dict[str, str], folder: Path, **changes: Any) -> Path:
    changes |= {"max_staleness": 1, "checkpoint": {"save_every_n_iterations": 2}}
    return tiny_loop.written(models, folder, **changes)


def test_sampling_does_not_wait_for_a_judge_that_is_slower_than_a_rollout(
    models: dict[str, str], tmp_path: Path
) -> None:
    """The first iteration's pictures are graded only after the second has begun to be sampled."""
    second = tmp_path / "tiny/judge/iteration_000001.rank0.jsonl"
    rewards = {
        "patient": {"type": "tests.helpers.patient_reward", "wait_for": str(second)},
        "viescore": {"type": "viescore"},
    }
    path = stale_config(
        models,
        tmp_path,
        num_iterations=2,
        rewards=rewards,
        final_reward={"weights": {"patient": 1}},
        evaluation={"every_n_iterations": 0},
    )
    tiny_loop.run_forked(path)
    _, first, late = metrics_of(tmp_path / "tiny")
    assert first["status/scored"] == late["status/scored"] == 1
    assert second.with_name("reward_is_closed").exists()
    assert first["reward/metric/patient/waited_s"] > 0, "the plugin's metric is logged"
    # The first weights sampled both; the second one's ratio corrects for the step between them.
    assert first["policy/ratio_max"] == 1
    assert late["policy/ratio_max"] != 1 and late["optimizer/grad_norm"] > 0
    assert late["mismatch/max_abs_dlogp"] < 1e-4, "old log-probs are of the weights that sampled"


def test_a_stale_run_resumes_exactly(models: dict[str, str], tmp_path: Path) -> None:
    """The rollout after a checkpoint uses the newest weights, whether the run stopped or not."""
    tiny_loop.run(stale_config(models, tmp_path / "uninterrupted"))
    path = stale_config(models, tmp_path / "killed")
    assert "2 iterations done" in tiny_loop.kill_and_resume(path, tiny_loop.STEP, "4")
    uninterrupted = tmp_path / "uninterrupted" / "tiny"
    assert_same_run(uninterrupted, tmp_path / "killed" / "tiny")
    ratios = [row["policy/ratio_max"] for row in metrics_of(uninterrupted)[1:]]
    assert [ratio == 1 for ratio in ratios] == [True, False, True, False]
