"""Kills the parts of a render pool at many instants, with real processes on three Ray nodes.

    python -m benchmarks.pool_deaths --out benchmarks/results/pool_deaths.md

Each case draws 48 pictures of `sleeping_renderer` with three workers while something dies, and
compares them with what every picture must be. `lost` counts pictures that are missing, failed or
wrong; `late` is the time beyond an undisturbed call in the same pool, which includes the time until
the loss is noticed. Ray nodes on one machine show scheduling and deaths, not a network;
`pool_runs.py` kills Ray beside whole runs.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's defaults are 5 tries every 3 s, each of 10 s.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_worker_register_timeout_seconds": "600",
}

import psutil
from ray.cluster_utils import Cluster

from benchmarks.sleeping_renderer import Config, SleepingRenderer, colour_of
from rl import build
from rl.api.types import RenderJob, Sample
from rl.config.schema import load_config
from rl.pool.pooled_renderer import pooled
from rl.ranks.dist import Dist

NUM_PICTURES, NUM_WORKERS = 48, 3


class Pool:
    """Three workers on the Ray cluster at `address`."""

    def __init__(self, address: str) -> None:
        keys = [f"render_pool.workers={NUM_WORKERS}", f"render_pool.address='{address}'"]
        config = load_config("configs/quickstart.jsonnet", keys)
        section = Config(type="benchmarks.sleeping_renderer")
        plugin = build.Plugin("renderer", section, SleepingRenderer)
        self.renderer = pooled(plugin, config, Dist())
        self.renderer.wait()

    def draw(self) -> tuple[float, int, int]:
        """(seconds, lost pictures, restarts) of one call."""
        began_s = time.monotonic()
        jobs = (RenderJob(Sample(str(i // 8), "x"), "words", i) for i in range(NUM_PICTURES))
        found = dict(self.renderer.render(jobs))
        seconds = time.monotonic() - began_s
        right = sum(
            hasattr(found.get(i), "tobytes") and found[i].tobytes() == colour_of(i).tobytes()
            for i in range(NUM_PICTURES)
        )
        return seconds, NUM_PICTURES - right, int(self.renderer.take_metrics()["pool_restarts"])

    def ready(self) -> None:
        """Draw until all workers are ready."""
        ends_s = time.monotonic() + 300
        while time.monotonic() < ends_s:
            self.draw()
            if self.renderer._state.num_ready == NUM_WORKERS:
                return

    def row(self, name: str, act: Callable[[], Any], quiet_s: float) -> str:
        """A line of the table: a call during which `act` runs after 1.1 s."""
        self.ready()
        with ThreadPoolExecutor(1) as executor:
            drawn = executor.submit(self.draw)
            time.sleep(1.1)
            act()  # Ray starts nodes in the main thread only
            seconds, lost, restarts = drawn.result()
        return f"| {name} | {seconds:.1f} | {seconds - quiet_s:.1f} | {restarts} | {lost} |"


HEADER = [
    "| what dies after 1.1 s | seconds | late | restarts | lost |",
    "|---|---:|---:|---:|---:|",
]


class Nodes:
    """A head without workers, a node for one worker, and a node for two."""

    def __init__(self) -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.nodes = [self.cluster.add_node(num_cpus=number) for number in (1, 2)]

    def processes(self, number: int) -> list[int]:
        """Those of a node: its raylet and everything it has started."""
        raylet = dict(self.nodes[number].live_processes())["raylet"].pid
        return [raylet, *(each.pid for each in psutil.Process(raylet).children(recursive=True))]

    def replace(self, *numbers: int, after_s: float = 0.0) -> None:
        """Kill nodes, and start others `after_s` later."""
        for number in numbers:
            self.cluster.remove_node(self.nodes[number], allow_graceful=False)
        time.sleep(after_s)
        for number in numbers:
            self.nodes[number] = self.cluster.add_node(num_cpus=number + 1)

    def stop_then_replace(self, seconds: float) -> None:
        stopped = self.processes(1)
        send(stopped, signal.SIGSTOP)
        time.sleep(seconds)
        self.replace(1)
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def workers() -> list[int]:
    """Process ids of all actors with a renderer."""
    found = psutil.process_iter(["name"])
    return [each.pid for each in found if each.info["name"].startswith("ray::Worker")]


def cases(nodes: Nodes) -> dict[str, Callable[[], Any]]:
    """What dies -> a function that kills it. It runs 1.1 s after the call has begun."""
    pids = workers()
    first, *_ = pids

    def twice() -> None:
        send([first], signal.SIGKILL)
        time.sleep(2)
        send(pids[1:2], signal.SIGKILL)

    def resumed() -> None:
        send([first], signal.SIGSTOP)
        time.sleep(3)
        send([first], signal.SIGCONT)

    return {
        "nothing": lambda: None,
        "one worker, SIGKILL": lambda: send([first], signal.SIGKILL),
        "one worker, SIGTERM": lambda: send([first], signal.SIGTERM),
        "one worker, SIGSEGV": lambda: send([first], signal.SIGSEGV),
        "two workers at once, SIGKILL": lambda: send(pids[:2], signal.SIGKILL),
        "all workers at once, SIGKILL": lambda: send(pids, signal.SIGKILL),
        "one worker, then another 2 s later": twice,
        "one worker stands still (SIGSTOP) for 3 s": resumed,
        "a node (its raylet), SIGKILL; replaced at once": lambda: nodes.replace(1),
        "a node stands still (SIGSTOP of all its processes), replaced after 12 s": lambda: (
            nodes.stop_then_replace(12)
        ),
        "all nodes with workers, SIGKILL; replaced after 8 s": lambda: nodes.replace(
            0, 1, after_s=8
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    args = parser.parse_args()
    began_s = time.monotonic()
    nodes = Nodes()
    pool = Pool(nodes.cluster.address)
    pool.ready()
    lines = [f"The pool was ready after {time.monotonic() - began_s:.0f} s.", "", *HEADER]
    quiet_s = min(pool.draw()[0] for _ in range(3))
    for name in [name for name in cases(nodes) if args.match in name]:
        pool.ready()
        lines.append(pool.row(name, cases(nodes)[name], quiet_s))
        print(lines[-1], flush=True)
        if args.out:
            args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    pool.renderer.close()
    nodes.cluster.shutdown()


if __name__ == "__main__":
    main()
