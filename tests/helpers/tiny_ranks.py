"""Real processes for tests: N gloo ranks, or one that may be killed.

A server that has imported `tiny_preload` forks them; in a new interpreter these imports would take
seconds of CPU each time.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tiny_config import REPO

from rl.ranks.supervision import on_one_node

PATIENCE_S = 300
"""Time limit; ranks share their cores with other tests."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.helpers.tiny_preload"])


def spawn(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Starts a process; `target` is a function of an importable module."""
    process = _CONTEXT.Process(target=target, args=args)
    process.start()
    return process


def run_forked(target: Callable[..., None], *args: Any) -> subprocess.CompletedProcess[str]:
    """Runs `target(*args)` at the repository root like a script; returns its output and status.

    All forked processes share one hash seed; to test that results do not depend on the order of a
    set, use a new interpreter.
    """
    with TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        process = _CONTEXT.Process(target=script_main, args=(files, target, args))
        process.start()
        process.join(PATIENCE_S)
        status = process.exitcode
        process.kill()
        process.join()
        printed, errors = (file.read_text() for file in files)
    assert status is not None, f"the process did not end in {PATIENCE_S} s: {printed} {errors}"
    return subprocess.CompletedProcess(target.__name__, status, printed, errors)


def script_main(files: Sequence[Path], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """`target(*args)` at the repository root; its output goes to `files`: stdout, stderr."""
    os.chdir(REPO)
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    target(*args)


def run_ranks(target: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """The values of `target(*args)` on all ranks; fails with the traceback if a rank raises."""
    with TemporaryDirectory() as folder:
        environ = on_one_node(Path(folder)) | {"WORLD_SIZE": str(world_size)}
        ranks = []
        for rank in range(world_size):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            of_rank = environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append((spawn(_rank_main, sender, of_rank, target, args), receiver))
            sender.close()
        try:
            outcomes = [pipe.recv() if pipe.poll(PATIENCE_S) else None for _, pipe in ranks]
        finally:
            for process, _ in ranks:
                process.kill()
    for outcome in outcomes:
        assert outcome is not None, f"a rank did not answer in {PATIENCE_S} s"
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
    """Runs `script` (indented or not) in a new interpreter at the repository root."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *args],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def held_port() -> Iterator[int]:
    """A port of 127.0.0.1 without a listener, which the kernel gives to no other process. A process
    that sets SO_REUSEADDR, as servers do, may listen there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
