"""Ray nodes on this machine, and a table of what happens when parts of them die."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

os.environ |= {
    "PYTHONUNBUFFERED": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_register_timeout_seconds": "600",
}


def start_node(*options: str) -> psutil.Popen:
    """`ray start --block`, whose descendants are all processes of the node; waits until they
    run."""
    command = [str(Path(sys.executable).parent / "ray"), "start", "--block", *options]
    node = psutil.Popen(
        [*command, "--node-ip-address=127.0.0.1"], stdout=subprocess.PIPE, start_new_session=True
    )
    if not any(b"runtime started" in line for line in node.stdout):
        raise RuntimeError("ray start failed")
    return node


def processes(node: psutil.Process) -> list[psutil.Process]:
    return [*node.children(recursive=True), node]


def named(node: psutil.Process, name: str = "ray::Worker") -> list[psutil.Process]:
    """Those of the node's processes whose names begin with `name`; by default the actors."""
    found = []
    for each in processes(node):
        with suppress(psutil.NoSuchProcess):
            if each.name().startswith(name):
                found.append(each)
    return found


def kill(targets: Iterable[psutil.Process]) -> None:
    for each in targets:
        with suppress(psutil.Error):
            each.kill()


@contextmanager
def cluster(num_cpus: int) -> Iterator[tuple[str, psutil.Popen]]:
    """(address, process of the head's node) of a Ray cluster."""
    port = 20_000 + os.getpid() % 5_000 * 2
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # nosec B108 # sockets need a short path
        options = [f"--port={port}", f"--num-cpus={num_cpus}", f"--temp-dir={folder}"]
        # Its default is a fixed port, which another cluster on this machine may have.
        options += [f"--ray-client-server-port={port + 1}", "--include-dashboard=false"]
        head = start_node("--head", *options)
        try:
            yield f"127.0.0.1:{port}", head
        finally:
            kill(processes(head))
            head.wait()


def print_table(header: str, cases: Iterable[str], row: Callable[[str], str]) -> None:
    """A table of `row(name)` for each case."""
    print(header)
    print("|---" + "|---:" * (header.count("|") - 2) + "|")
    for name in cases:
        print(f"| {name} | {row(name)} |", flush=True)
