"""Finds the checkpoint that scored best on held-out samples in the run's metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.files.atomic import read_rows


def held_out_rewards(run_dir: Path) -> dict[int, float | None]:
    """Iterations done -> mean held-out reward, 0..1, or None where it was not measured; without
    iterations that have no readable line."""
    file = run_dir / "metrics.jsonl"
    rewards: dict[int, float | None] = {0: None}  # before training there may be no line
    for row in read_rows(file)[0] if file.is_file() else []:
        if type(row.get("iteration")) is int:
            value: Any = row.get("eval/reward")
            is_one = type(value) in (int, float) and 0 <= value <= 1
            rewards[row["iteration"]] = float(value) if is_one else None
    return rewards


def best_of(iterations: Sequence[int], rewards: dict[int, float | None]) -> int | None:
    """Which of them scored highest, of equals the earliest; None: none was measured."""
    measured = [(-reward, it) for it in iterations if (reward := rewards.get(it)) is not None]
    return min(measured)[1] if measured else None
