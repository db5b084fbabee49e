"""Two nodes on one machine: two network namespaces and a virtual cable that can be cut.

Needs root, iproute2, and a kernel with network namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import tiny_loop

CABLE = "rl0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")


@dataclass(eq=False)
class Nodes:
    """Two open nodes and the processes that were started there."""

    names: tuple[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, node: int, command: Sequence[str], errors: Path, **environ: str
    ) -> subprocess.Popen[str]:
        """Starts `command` on a node at the repository root; writes its output to `errors`."""
        with open(errors, "w", encoding="utf-8") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[node], *command],
                env=tiny_loop.environment(**environ),
                cwd=tiny_loop.REPO,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.started.append(process)
        return process

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Cuts the cable inside the block; neither side is notified."""
        _ip("-n", self.names[1], "link", "set", CABLE, "down")
        try:
            yield
        finally:
            _ip("-n", self.names[1], "link", "set", CABLE, "up")


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Opens two nodes at `ADDRESSES`; kills all processes that were started there in the end.

    Raises OSError or CalledProcessError if user or kernel cannot have such nodes.
    """
    names = (f"rl-{os.getpid()}-a", f"rl-{os.getpid()}-b")
    nodes = Nodes(names)
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("-n", names[0], "link", "add", CABLE, "type", "veth", "peer", CABLE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            _ip("-n", name, "link", "set", CABLE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield nodes
    finally:
        for process in nodes.started:
            if process.poll() is None:
                for each in (*psutil.Process(process.pid).children(recursive=True), process):
                    each.kill()
            process.wait()
        for name in names:
            if Path("/run/netns", name).exists():
                _ip("netns", "delete", name)


def why_not() -> str:
    """Why such nodes are impossible on this machine; '' if they are possible."""
    if shutil.which("ip") is None:
        return "ip is missing (package iproute2)"
    try:
        with two_nodes() as nodes, nodes.cut():
            pass
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
