"""Whole runs of a policy that thinks: killed and resumed, and what a run leaves of its thoughts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_loop
from tiny_loop import assert_same_run, episodes_of, metrics_of

pytestmark = pytest.mark.slow


def config_of(models: dict[str, str], folder: Path, states: str) -> dict[str, Any]:
    """Random weights write no tag: 'e' ends a thought, so that there are all kinds of ends."""
    config = tiny_loop.config_of(models, folder, num_iterations=2)
    thought = {"instruction": "Think, then write {marker}.", "marker": "e", "states": states}
    config["policy"] |= {"thought": thought}
    config["sampling"] |= {"max_completion_tokens": 12}
    config["optimizer"] |= {"max_tokens_per_micro_batch": 400}
    config["evaluation"] |= {"every_n_iterations": 2, "num_samples": 2, "thought_gain": True}
    return config


@pytest.mark.parametrize("states", ["words", pytest.param("attended", marks=pytest.mark.campaign)])
def test_killed_and_resumed_it_is_the_same_run(
    models: dict[str, str], tmp_path: Path, states: str
) -> None:
    whole = tiny_loop.write_config(tmp_path / "a", config_of(models, tmp_path / "a", states))
    tiny_loop.run_forked(whole)
    cut = tiny_loop.write_config(tmp_path / "b", config_of(models, tmp_path / "b", states))
    tiny_loop.kill_and_resume(cut, tiny_loop.STEP, "2")
    straight, again = tmp_path / "a" / "tiny", tmp_path / "b" / "tiny"
    assert_same_run(straight, again, 2)

    rows, episodes = metrics_of(straight), episodes_of(straight)
    assert all(row["optimizer/grad_norm"] > 0 for row in rows[1:])
    ends = {str(row["failure"]).partition(":")[0] for row in episodes}
    assert {"None", "unfinished thought"} <= ends <= {"None", "unfinished thought", "empty"}
    thought = [row for row in episodes if row["status"] == "scored"]
    assert thought and all(row["thought"].rstrip().endswith("e") for row in thought)
    assert all(row["thought"] + row["words"] == row["completion"] for row in thought)
    assert all("thought" not in row["bare"] for row in episodes if row.get("bare"))
    shares = [row["thought/unfinished"] for row in rows[1:]]
    assert all(0 <= share <= 1 for share in shares) and any(shares)
    lost = sum(str(row["failure"]).startswith("unfinished") for row in episodes)
    assert lost == pytest.approx(sum(shares) * len(episodes) / len(shares))
    assert "eval/cut_thought_reward" in rows[0], "what words without a thought were worth"
    gain = rows[0].get("eval/gain_of_thought")
    assert gain is None or -1 <= gain <= 1
