"""Real processes for tests: N gloo ranks, or one that may be killed.

What: `run_ranks` and `spawn`, forked off a server that has imported torch once (a fresh interpreter
per rank would spend two seconds of CPU each on that), and `start` for scripts that import little.
What not: torchrun; its variables are set by hand, which is all that `Dist.from_env` sees of it.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "safetensors.torch"])


def spawn(target: Callable[..., None], *args: Any) -> BaseProcess:
    """A running process; `target` is a function of an importable module."""
    process = _CONTEXT.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def run_ranks(target: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What `target(*args)` returns on every rank; fails with the traceback of one that raises."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    ranks = []
    for rank in range(world_size):
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        of_rank = environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append((spawn(_rank_main, sender, of_rank, target, args), receiver))
        sender.close()
    try:
        outcomes = [receiver.recv() if receiver.poll(120) else None for _, receiver in ranks]
    finally:
        for process, _ in ranks:
            process.kill()
    for outcome in outcomes:
        assert outcome is not None, "a rank did not answer in 120 s"
        assert outcome[0], outcome[1]
    return [value for _, value in outcomes]


def _rank_main(
    sender: Connection, environ: dict[str, str], target: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(environ)
    try:
        sender.send((True, target(*args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))


def start(script: str, *args: str, **environ: str) -> subprocess.Popen[str]:
    """`script` (indented as one likes) in a fresh interpreter at the repository root."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
