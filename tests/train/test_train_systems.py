"""Every system on the one loop: its shipped tiny config, shortened, straight and killed."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import tiny_loop
from tiny_rounding import NATS

SYSTEMS = ("tiny_earl", "tiny_reasoning", "tiny_prompts")
THIS_YEARS = ("tiny_qwen_image_21", "tiny_thinking")


def write(folder: Path, system: str, engine: str = "transformers") -> Path:
    return tiny_loop.write_config(folder, tiny_loop.shortened(system, folder, engine))


@pytest.mark.parametrize("system", SYSTEMS)
def test_it_runs_learns_and_leaves_its_record(system: str, tmp_path: Path) -> None:
    tiny_loop.run_forked(write(tmp_path, system))
    run_dir = tmp_path / "tiny"
    rows = tiny_loop.metrics_of(run_dir)
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3]
    assert {"eval/reward"} <= rows[0].keys() & rows[3].keys()
    assert all(row["status/ungraded"] == 0 for row in rows[1:])
    assert any(row["optimizer/grad_norm"] > 0 for row in rows[1:] if "optimizer/grad_norm" in row)
    assert max(row.get("mismatch/max_abs_dlogp", 0) for row in rows) < NATS
    assert rows[3]["sync/mean_abs_dlogp"] < 1e-5
    episodes = tiny_loop.episodes_of(run_dir)
    assert len(episodes) == 3 * 2 * 4
    draws = system != "tiny_reasoning"
    assert (episodes[0]["image_file"] is not None) == draws
    assert ("reward_gain" in rows[1]) == (system == "tiny_prompts"), "who has words of his own"
    # What no trained state conditions cannot drift, and is not said to have drifted by nothing.
    assert not [name for row in rows for name in row if name.startswith("drift/")]
    for row in (rows[0], rows[3]):
        assert ("eval/gain_over_stock" in row) == ("eval/stock_reward" in row) == draws
        assert row.get("eval/stock_reward") == rows[0].get("eval/stock_reward")
        if system == "tiny_prompts":
            words_as_they_are = pytest.approx(row["eval/bare_reward"], abs=1e-3)
            assert row["eval/stock_reward"] == words_as_they_are
    if system == "tiny_earl":
        assert rows[0]["eval/gain_over_stock"] == 0, "its own start"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "engine"),
    [*product(SYSTEMS, ("transformers", "vllm")), *product(THIS_YEARS, ("vllm",))],
)
def test_killed_and_resumed_is_straight_through(system: str, engine: str, tmp_path: Path) -> None:
    straight, broken = (write(tmp_path / name, system, engine) for name in ("straight", "broken"))
    tiny_loop.run(straight)
    killed = tiny_loop.run_forked(broken, "rl.learner.train_step:TrainStep.step", "2", check=False)
    assert killed.returncode == -9, killed.stderr[-2000:]
    assert "resumed from" in tiny_loop.run(broken).stdout
    tiny_loop.assert_same_run(tmp_path / "straight/tiny", tmp_path / "broken/tiny", 3)
