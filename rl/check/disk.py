"""Compares a run's checkpoints with the free space of its disk (GB: 1e9 bytes)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rl.build import Resolved
from rl.checkpoints.checkpoint import find
from rl.memory import footprint

NUM_CHECKPOINTS = 3
"""The newest two, and one that is being written; beside them the best on held-out samples."""
STATE_BYTES = 12
"""Bytes of a trained parameter's float32 value and moments."""


def free_gb(folder: Path) -> float:
    """On the file system of `folder`, which need not exist yet."""
    places = (folder, *folder.absolute().parents)
    there = next(place for place in places if os.path.exists(place))
    return shutil.disk_usage(there).free / 1e9


def checkpoint_gb(resolved: Resolved) -> float | None:
    """Size of one checkpoint: the model's files, and float32 values and moments; None where the
    policy's size is unknown."""
    sizes = footprint.sizes(resolved)
    if sizes is None:
        return None
    model_bytes = sizes.bytes_per_weight if sizes.lora_rank is None else 4
    return sizes.trained_params * (model_bytes + STATE_BYTES) / 1e9


def disk_line(resolved: Resolved) -> str:
    """What the checkpoints need, and what is free."""
    folder = Path(resolved.config.base_exp_dir)
    one_gb, number = checkpoint_gb(resolved), _num_checkpoints(resolved)
    need = "unknown, like the policy's size"
    if one_gb is not None:
        need = f"up to {_size(number * one_gb)} ({number} of {_size(one_gb)}), and pictures"
    return f"checkpoints: {need}; {_size(free_gb(folder))} are free at {folder} on this machine"


def disk_problems(resolved: Resolved) -> list[str]:
    """Where the checkpoints alone would fill this machine's disk."""
    folder = Path(resolved.config.base_exp_dir)
    need, free = _num_checkpoints(resolved) * (checkpoint_gb(resolved) or 0.0), free_gb(folder)
    if need <= free:
        return []
    return [
        f"base_exp_dir: the run's checkpoints take up to {_size(need)}, and {_size(free)} are free "
        f"at {folder}; name a larger disk"
    ]


def _num_checkpoints(resolved: Resolved) -> int:
    """Still to be written beside those that a resumed run has."""
    config = resolved.config
    if find(config.run_dir, hashes=False).path is not None:
        return 1
    keeps_best = bool(config.evaluation.every_n_iterations and config.data.validation)
    return NUM_CHECKPOINTS + keeps_best


def _size(gb: float) -> str:
    return f"{gb:.1f} GB" if gb >= 1 else f"{gb * 1e3:.1f} MB"
