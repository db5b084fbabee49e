"""Runs of a policy that thinks resume exactly and record thoughts and their metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_loop
from tiny_loop import assert_same_run, episodes_of, metrics_of

pytestmark = pytest.mark.slow


def write_config(models: dict[str, str], folder: Path) -> Path:
    """Random weights write no tag; with 'e' as the marker some thoughts end and others do not."""
    config = tiny_loop.config_of(models, folder, num_iterations=2)
    config["policy"]["thought"] = {"instruction": "Think, then write {marker}.", "marker": "e"}
    config["sampling"]["max_completion_tokens"] = 12
    config["optimizer"]["max_tokens_per_micro_batch"] = 400
    config["evaluation"] = {"every_n_iterations": 2, "num_samples": 2, "thought_gain": True}
    return tiny_loop.write_config(folder, config)


def test_a_killed_run_with_thoughts_resumes_exactly(models: dict[str, str], tmp_path: Path) -> None:
    whole, killed = (write_config(models, tmp_path / name) for name in ("whole", "killed"))
    tiny_loop.run_forked(whole)
    tiny_loop.kill_and_resume(killed, tiny_loop.STEP, "2")
    uninterrupted = tmp_path / "whole/tiny"
    assert_same_run(uninterrupted, tmp_path / "killed/tiny", 2)

    rows, episodes = metrics_of(uninterrupted), episodes_of(uninterrupted)
    assert all(row["optimizer/grad_norm"] > 0 for row in rows[1:])
    ends = {str(row["failure"]).partition(":")[0] for row in episodes}
    assert {"None", "unfinished thought"} <= ends <= {"None", "unfinished thought", "empty"}
    thought = [row for row in episodes if row["status"] == "scored"]
    assert thought and all(row["thought"].rstrip().endswith("e") for row in thought)
    assert all(row["thought"] + row["words"] == row["completion"] for row in thought)
    assert all("thought" not in row["bare"] for row in episodes if row.get("bare"))
    shares = [row["thought/unfinished"] for row in rows[1:]]
    assert all(0 <= share <= 1 for share in shares) and any(shares)
    num_unfinished = sum(str(row["failure"]).startswith("unfinished") for row in episodes)
    assert num_unfinished == pytest.approx(sum(shares) * len(episodes) / len(shares))
    assert "eval/cut_thought_reward" in rows[0], "the reward of words without a thought"
    assert -1 <= rows[0].get("eval/gain_of_thought", 0) <= 1
