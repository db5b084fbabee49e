"""Shortened shipped tiny configs give recorded numbers, and resume exactly after a kill."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_loop
from tiny_rounding import FORWARD_TOL

from rl.run.metric_table import doc_of, shipped_rows

SYSTEMS = ("tiny_earl", "tiny_reasoning", "tiny_prompts", "tiny_qwen_image_21", "tiny_thinking")
FILE = Path(__file__).with_suffix(".json")
"""System -> `METRICS` of each iteration. `python tests/train/test_train_systems.py FOLDER` (with
`tests/helpers` on PYTHONPATH) records them again; a commit that changes them says why."""
METRICS = ("reward/mean", "loss/total", "optimizer/grad_norm", "policy/entropy", "eval/reward")
RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""Without AVX a metric changes by at most 1.3e-6 of its value (measured)."""


def write(folder: Path, system: str, engine: str = "transformers") -> Path:
    config = tiny_loop.shortened(system, folder, engine)
    # With a small epsilon the first step would follow the sign of gradients that are rounding.
    config["optimizer"]["adam_eps"] = 1e-3
    return tiny_loop.write_config(folder, config)


def recorded_metrics(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{name: row[name] for name in METRICS if name in row} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_three_iterations_have_the_recorded_numbers(system: str, tmp_path: Path) -> None:
    tiny_loop.run_forked(write(tmp_path, system))
    run_dir = tmp_path / "tiny"
    rows = tiny_loop.metrics_of(run_dir)
    recorded = json.loads(FILE.read_text(encoding="utf-8"))[system]
    for row, expected in zip(recorded_metrics(rows), recorded, strict=True):
        assert row == pytest.approx(expected, rel=RELATIVE, abs=ABSOLUTE)
    assert tiny_loop.iterations_of(run_dir) == [0, 1, 2, 3]
    logged = {name for row in rows for name in row} - shipped_rows().keys()
    assert [name for name in logged if not doc_of(name)] == ["iteration"]
    assert all(row["status/ungraded"] == 0 for row in rows[1:])
    assert any(row["optimizer/grad_norm"] > 0 for row in rows[1:] if "optimizer/grad_norm" in row)
    assert max(row.get("mismatch/max_abs_dlogp", 0) for row in rows) < FORWARD_TOL
    assert rows[3]["sync/mean_abs_dlogp"] < 1e-5
    episodes = tiny_loop.episodes_of(run_dir)
    assert len(episodes) == 3 * 2 * 4
    assert (episodes[0]["image_file"] is not None) == (system != "tiny_reasoning")
    has_bare_arm = system in ("tiny_prompts", "tiny_qwen_image_21")
    assert ("reward_gain" in rows[1]) == has_bare_arm, "reward of the user's unchanged words"
    has_stock = system not in ("tiny_reasoning", "tiny_thinking")
    for row in (rows[0], rows[3]):
        assert ("eval/gain_over_stock" in row) == ("eval/stock_reward" in row) == has_stock
        assert row.get("eval/stock_reward") == rows[0].get("eval/stock_reward")
        if system == "tiny_prompts":
            assert row["eval/stock_reward"] == pytest.approx(row["eval/bare_reward"], abs=1e-3)
    if system == "tiny_earl":
        assert rows[0]["eval/gain_over_stock"] == 0, "it starts as the stock arm"


@pytest.mark.campaign
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_killed_run_resumes_exactly(system: str, engine: str, tmp_path: Path) -> None:
    uninterrupted, killed = (
        write(tmp_path / name, system, engine) for name in ("uninterrupted", "broken")
    )
    tiny_loop.run(uninterrupted)
    tiny_loop.kill_and_resume(killed, tiny_loop.STEP, "2")
    tiny_loop.assert_same_run(tmp_path / "uninterrupted/tiny", tmp_path / "broken/tiny", 3)


def record(folder: Path) -> None:
    recorded = {}
    for system in SYSTEMS:
        tiny_loop.run(write(folder / system, system))
        recorded[system] = recorded_metrics(tiny_loop.metrics_of(folder / system / "tiny"))
    FILE.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
