"""Run a few lines of Python in real processes: as N gloo ranks, or as one that can be killed.

What: `run_ranks` and `start`. What not: torchrun; its variables are set by hand, which is all that
`Dist.from_env` sees of it. Used by tests of collectives, checkpoints and signals.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def start(script: str, *args: str, **environ: str) -> subprocess.Popen[str]:
    """`script` (indented as one likes) in a fresh interpreter at the repository root."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_ranks(script: str, world_size: int, *args: str, timeout_s: float = 90) -> list[str]:
    """stdout of every rank; fails with a rank's stderr when one does not end well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    ranks = [
        start(script, *args, RANK=str(rank), LOCAL_RANK=str(rank), **environ)
        for rank in range(world_size)
    ]
    try:
        ends = [rank.communicate(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, stderr) in zip(ranks, ends, strict=True):
        assert rank.returncode == 0, stderr[-3000:]
    return [stdout for stdout, _ in ends]
