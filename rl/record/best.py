"""Which checkpoint scored best on held-out samples: it stays, however old it is.

    <run>/best_checkpoint.json      {"checkpoint": "step_000020", "reward": 0.87}

Only a checkpoint that a held-out run measured can be it: where the two cadences
(`checkpoint.save_every_n_iterations`, `evaluation.every_n_iterations`) meet. What not: checkpoints
themselves (`checkpoint.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rl.files.atomic import json_line, row_of, write_atomically

BEST = "best_checkpoint.json"


@dataclass(frozen=True)
class Best:
    """What the file says."""

    name: str
    """Of a folder in `<run>/checkpoints`, which may be gone."""
    reward: float
    """Mean on the held-out samples, 0 to 1."""


def read_best(run_dir: Path) -> Best | None:
    """None where none was noted yet, or the file is damaged: the next held-out run notes anew."""
    file = run_dir / BEST
    row = (row_of(file.read_bytes()) if file.is_file() else None) or {}
    name, reward = row.get("checkpoint"), row.get("reward")
    if not isinstance(name, str) or not isinstance(reward, int | float):
        return None
    try:
        return Best(name, float(reward)) if math.isfinite(reward) else None
    except OverflowError:  # of an integer
        return None


def note_if_best(run_dir: Path, checkpoint: Path, reward: float) -> bool:
    """Note a checkpoint that scored above the one that was best so far, or that takes the place of
    one that is gone. Of equals the earlier stays. Returns whether it is the best."""
    best = read_best(run_dir)
    is_other = best is not None and best.name != checkpoint.name
    if best and is_other and reward <= best.reward and (checkpoint.parent / best.name).is_dir():
        return False
    write_atomically(run_dir / BEST, json_line({"checkpoint": checkpoint.name, "reward": reward}))
    return True
