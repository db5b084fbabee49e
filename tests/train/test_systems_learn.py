"""The shipped tiny configs learn, and their controls with shuffled rewards do not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_config import REPO
from tiny_loop import rows_of
from tiny_shipped import climb, most_dead_groups, run

from tiny_world.riddles import NUM_CHAINS

SLOW = ("quickstart", "quickstart_control", "tiny_stock_editor")
"""These run in CI, the others by hand."""
QUICKSTART = "QUICKSTART_RUN"
"""Environment variable: the folder of a finished quickstart, which is then not run again."""


@dataclass(frozen=True)
class Learns:
    """Bounds on logged metrics, looser than the worst seed in benchmarks/results/seeds.md."""

    climb: float
    before: dict[str, float]
    """Metric -> upper bound before training."""
    after: dict[str, float]
    """Metric -> lower bound at the end."""
    dead_groups: float = 0.25
    reference: float = 0.0
    """Lower bound on the score of reference descriptions before and after training."""
    overrides: tuple[str, ...] = ()


LEARNS = {
    "quickstart": Learns(
        0.4,
        {"eval/reward": 0.4},
        {"eval/reward": 0.9, "eval/reference_match": 0.75},
        reference=0.95,
    ),
    "tiny_earl": Learns(0.35, {"eval/reward": 0.4}, {"eval/reward": 0.78}),
    "tiny_reasoning": Learns(
        0.2, {"eval/part/accuracy": 0.4}, {"eval/part/accuracy": 0.85, "eval/part/format": 0.95}
    ),
    "tiny_prompts": Learns(
        0.2,
        {"eval/reward": 0.65},
        {"eval/reward": 0.85, "eval/reference_match": 0.7},
        reference=0.85,
    ),
    "tiny_qwen_image_21": Learns(
        0.25,
        {"eval/reward": 0.5, "eval/reward/borrow": 0.5},
        {"eval/reward": 0.7, "eval/reward/borrow": 0.7},
        dead_groups=0.3,
        reference=0.8,
    ),
    "tiny_thinking": Learns(
        0.2, {"eval/reward": 0.5}, {"eval/reward": 0.65}, dead_groups=1.0, reference=0.9
    ),
    "tiny_stock_editor": Learns(
        0.05,
        {"eval/reward": 0.45, "eval/bare_reward": 0.05},
        {"eval/reward": 0.6},
        reference=0.95,
        overrides=("num_iterations=15",),
    ),
}
SHORTER = (
    "num_iterations=20",
    "evaluation.every_n_iterations=20",
    # No bound of a control reads these; `quickstart` has them.
    "evaluation.stock_arm=false",
    "evaluation.reference_drift=false",
    "tracking.log_episodes_every_n_iterations=0",
    "judge.audit='off'",
)
CONTROLS = {
    "quickstart_control": (0.06, "eval/reward", 0.5, SHORTER),
    "tiny_earl_control": (0.08, "eval/reward", 0.45, ()),
    "tiny_reasoning_control": (0.08, "eval/part/accuracy", 0.5, ()),
    "tiny_prompts_control": (0.08, "eval/reward", 0.65, ()),
    "tiny_qwen_image_21_control": (0.08, "eval/reward", 0.5, SHORTER),
    "tiny_stock_editor_control": (0.08, "eval/reward", 0.5, ()),
    "tiny_thinking_control": (0.12, "eval/reward", 0.5, ()),
    # The twin may not think; one look-up without thinking is all that it can learn.
    "tiny_thinking_twin": (1.0, "eval/reward", 1 / NUM_CHAINS + 0.15, ("num_iterations=20",)),
}
"""Config -> (upper bound on |climb| of the reward, a metric, its bound at the end, overrides)."""


def tiers(names: Any) -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.campaign)
        for name in names
    ]


def metrics_rows(name: str, folder: Path) -> list[dict[str, Any]]:
    if name == "quickstart" and QUICKSTART in os.environ:
        return rows_of(REPO / os.environ[QUICKSTART] / "metrics.jsonl")
    return run(f"configs/{name}.jsonnet", folder, *LEARNS[name].overrides)


@pytest.mark.parametrize("name", tiers(LEARNS))
def test_a_shipped_config_learns(name: str, tmp_path: Path) -> None:
    rows, bounds = metrics_rows(name, tmp_path), LEARNS[name]
    first, last = rows[0], rows[-1]
    assert climb(rows) > bounds.climb
    for metric, most in bounds.before.items():
        assert first[metric] < most, metric
    for metric, least in bounds.after.items():
        assert last[metric] > least, metric
    assert most_dead_groups(rows) < bounds.dead_groups
    if bounds.reference:  # the frozen renderer still understands reference descriptions
        assert min(row["eval_reference/reward"] for row in (first, last)) > bounds.reference
    assert all(row["mismatch/max_abs_dlogp"] < 1e-3 for row in rows[1:])
    if name == "tiny_earl":  # the grammar makes every picture complete, whatever the weights
        assert all(row["status/policy_failed"] == 0 for row in rows[1:])


@pytest.mark.parametrize("name", tiers(CONTROLS))
def test_a_control_learns_nothing(name: str, tmp_path: Path) -> None:
    most_climb, metric, most, overrides = CONTROLS[name]
    rows = run(f"configs/{name}.jsonnet", tmp_path, *overrides)
    assert abs(climb(rows)) < most_climb
    assert rows[-1][metric] < most
