"""Trains a config in a process of its own, unless its run is finished already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rl.record.run_summary import summarise


def train(run: Path, config: str, *overrides: str) -> None:
    """`run`: the run's folder; what it prints is in a file beside it."""
    summary = summarise(run)
    if summary.planned == str(summary.done):
        return
    run.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "rl.simple_launch", "--nproc", "1"]
    where = [f"configs/{config}.jsonnet", f"base_exp_dir={run.parent}", f"run_name={run.name}"]
    with open(f"{run}.log", "ab") as log:
        subprocess.run(
            [*command, *where, *overrides],
            env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            check=True,
        )
