"""Cuts the network between two Ray nodes of a render pool, with Linux network namespaces.

    python -m benchmarks.pool_network --out benchmarks/results/pool_network.md

It needs root. Head, driver and one worker are in one namespace, two workers in another; a pair of
virtual Ethernet devices joins them. The link goes down 1.1 s after a call of 48 pictures has begun.
`lost` and `late` are those of `pool_deaths.py`, whose health check of 1 s and three failures is
used.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.pool_deaths import HEADER, Pool
from rl.pool import dispatch, ray_cluster

HERE, THERE = "pool_here", "pool_there"
ADDRESSES = {HERE: "10.77.29.1", THERE: "10.77.29.2"}
RAY = str(Path(sys.executable).parent / "ray")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def make_namespaces() -> None:
    for name in (HERE, THERE):
        ip("netns", "add", name)
    ip("link", "add", "pool0", "netns", HERE, "type", "veth", "peer", "pool0", "netns", THERE)
    for name, address in ADDRESSES.items():
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "pool0")
        ip("-n", name, "link", "set", "pool0", "up")
        ip("-n", name, "link", "set", "lo", "up")


def cut() -> None:
    ip("-n", THERE, "link", "set", "pool0", "down")


def restore() -> None:
    ip("-n", THERE, "link", "set", "pool0", "up")


class Node:
    """The node in the other namespace."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        command = [RAY, "start", "--block", f"--address={ADDRESSES[HERE]}:6399", "--num-cpus=2"]
        self._ray = subprocess.Popen(
            ["ip", "netns", "exec", THERE, *command, f"--node-ip-address={ADDRESSES[THERE]}"],
            stdout=subprocess.DEVNULL,
        )

    def end(self) -> None:
        self._ray.terminate()
        self._ray.wait()

    def cut_for(self, seconds: float) -> Callable[[], None]:
        """The node stays; Ray may have given it up, and then it ends and is started again."""

        def act() -> None:
            cut()
            time.sleep(seconds)
            restore()
            time.sleep(5)
            if self._ray.poll() is not None:
                self.start()

        return act

    def cut_and_replaced(self) -> None:
        """As if a machine was unreachable for good, and another one joined after 20 s."""
        cut()
        time.sleep(20)
        self.end()
        restore()
        self.start()


def measure(out: Path | None) -> None:
    dispatch.SILENT_S = 5.0  # instead of a minute
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # nosec B108 # sockets need a short path
        command = [RAY, "start", "--head", "--block", "--port=6399", "--num-cpus=1"]
        options = ["--include-dashboard=false", f"--temp-dir={folder}"]
        head = subprocess.Popen(
            [*command, *options, f"--node-ip-address={ADDRESSES[HERE]}"], stdout=subprocess.DEVNULL
        )
        time.sleep(25)
        node = Node()
        try:
            pool = Pool(f"{ADDRESSES[HERE]}:6399")
            pool.ready()
            quiet_s = min(pool.draw()[0] for _ in range(3))
            lines = [*HEADER, pool.row("nothing", lambda: None, quiet_s)]
            for name, act in {
                "the link is down for 2 s": node.cut_for(2),
                "the link is down for 15 s": node.cut_for(15),
                "the link is down for good; another node joins after 20 s": node.cut_and_replaced,
            }.items():
                lines.append(pool.row(name, act, quiet_s))
                print(lines[-1], flush=True)
                if out:
                    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
            ray_cluster.disconnect()
        finally:
            node.end()
            head.terminate()
            head.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        measure(args.out)
        return
    make_namespaces()
    try:
        again = [sys.executable, "-m", "benchmarks.pool_network", *sys.argv[1:], "--inside"]
        subprocess.run(["ip", "netns", "exec", HERE, *again], env=os.environ, check=True)
    finally:
        for name in (HERE, THERE):
            ip("netns", "del", name)


if __name__ == "__main__":
    main()
