"""Writes checkpoints of a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from rl.config.schema import CheckpointConfig
from rl.files import append_line, json_line
from rl.ranks.dist import Dist
from rl.record.checkpoint import Checkpoints, ResumePoint
from rl.seeds import rng_state


def checkpoints_in(folder: Path, **config) -> Checkpoints:
    return Checkpoints(folder, CheckpointConfig(**config), Dist())


def save(
    checkpoints: Checkpoints,
    iteration: int,
    write_model: Callable[[Path], None] | None = None,
    final: bool = False,
    size: int = 12,
    reward: float | None = None,
    **measured: float,
) -> Path | None:
    """Every number in the checkpoint is its iteration, so that a mixture is noticed. `reward`: the
    held-out reward, in a line of metrics that is written before the checkpoint, with `measured`, of
    the evaluation as well."""
    with suppress(FileNotFoundError):
        metrics = checkpoints.folder.parent / "metrics.jsonl"
        line = {f"eval/{name}": value for name, value in {"reward": reward, **measured}.items()}
        append_line(metrics, json_line({"iteration": iteration, **line}))
    return checkpoints.save(point(iteration, write_model, size), final)


def point(
    iteration: int, write_model: Callable[[Path], None] | None = None, size: int = 12
) -> ResumePoint:
    def write(folder: Path) -> None:
        (folder / "adapter_model.bin").write_text(str(iteration) * 100)

    return ResumePoint(
        iteration,
        {"master/w": torch.full((size,), float(iteration)), "exp_avg/w": torch.zeros(2)},
        {"learner": {"version": iteration}, "config": {"format": 3, "seed": 1}},
        [rng_state()],
        write_model or write,
        f"# card {iteration}\n",
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())
