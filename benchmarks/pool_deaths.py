"""Kills the parts of a render pool, with real processes on three Ray nodes.

    python -m benchmarks.pool_deaths > pool_deaths.md

Each case draws 48 pictures of `sleeping_renderer` with three workers while something dies, and
compares them with what every picture must be. `lost` counts pictures that are missing, failed or
wrong; `late` is the time beyond an undisturbed call in the same pool, which includes the time until
the loss is noticed. Ray nodes on one machine show scheduling and deaths, not a network;
`pool_runs.py` kills Ray beside whole runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from threading import Timer
from typing import Any

import psutil

from benchmarks.ray_nodes import cluster, kill, named, print_table, processes, start_node
from benchmarks.sleeping_renderer import SleepingRenderer, colour_of
from rl import build
from rl.api.plugin import PluginConfig
from rl.api.types import RenderJob, Sample
from rl.config.schema import load_config
from rl.pool.pooled_renderer import PooledRenderer, pooled
from rl.ranks.dist import Dist

# Ray's defaults are 5 tries every 3 s, each of 10 s.
os.environ |= {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
NUM_PICTURES, NUM_WORKERS = 48, 3


class Trial:
    """Three workers on a node for one and a node for two; the head's node has none."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.nodes = [self.node(1), self.node(2)]
        keys = [f"render_pool.workers={NUM_WORKERS}", f"render_pool.address='{address}'"]
        config = load_config("configs/quickstart.jsonnet", keys)
        section = PluginConfig(type="benchmarks.sleeping_renderer")
        plugin = build.Plugin("renderer", section, SleepingRenderer)
        self.renderer: PooledRenderer = pooled(plugin, config, Dist())
        self.renderer.wait()
        self.ready()
        self.quiet_s = min(self.draw()[0] for _ in range(3))

    def node(self, num_cpus: int) -> psutil.Popen:
        return start_node(f"--address={self.address}", f"--num-cpus={num_cpus}")

    def replace(self, *numbers: int, after_s: float = 0.0) -> None:
        """Kill nodes, and start others `after_s` later."""
        for number in numbers:
            kill(processes(self.nodes[number]))
        time.sleep(after_s)
        for number in numbers:
            self.nodes[number] = self.node(number + 1)

    def draw(self) -> tuple[float, int, int]:
        """(seconds, lost pictures, restarts) of one call."""
        began_s = time.monotonic()
        jobs = (RenderJob(Sample(str(i // 8), "x"), "words", i) for i in range(NUM_PICTURES))
        found = dict(self.renderer.render(jobs))
        seconds = time.monotonic() - began_s
        right = sum(
            getattr(found.get(i), "tobytes", bytes)() == colour_of(i).tobytes()
            for i in range(NUM_PICTURES)
        )
        return seconds, NUM_PICTURES - right, int(self.renderer.take_metrics()["pool_restarts"])

    def ready(self) -> None:
        """Draw until all workers are ready."""
        while self.renderer._state.num_ready < NUM_WORKERS:
            self.draw()

    def row(self, name: str) -> str:
        self.ready()
        workers = [each for node in self.nodes for each in named(node)]
        timer = Timer(1.1, CASES[name], [self, workers])
        timer.start()
        seconds, lost, restarts = self.draw()
        timer.join()
        return f"{seconds:.1f} | {seconds - self.quiet_s:.1f} | {restarts} | {lost}"


def twice(trial: Trial, workers: list[psutil.Process]) -> None:
    workers[0].kill()
    time.sleep(2)
    workers[1].kill()


def pause(trial: Trial, workers: list[psutil.Process]) -> None:
    workers[0].suspend()
    time.sleep(3)
    workers[0].resume()


def suspend_node(trial: Trial, workers: list[psutil.Process]) -> None:
    for each in processes(trial.nodes[1]):
        each.suspend()
    time.sleep(12)
    trial.replace(1)


CASES: dict[str, Callable[[Trial, list[psutil.Process]], Any]] = {
    "nothing": lambda trial, workers: None,
    "one worker, SIGKILL": lambda trial, workers: workers[0].kill(),
    "one worker, SIGTERM": lambda trial, workers: workers[0].terminate(),
    "one worker, SIGSEGV": lambda trial, workers: workers[0].send_signal(11),
    "two workers at once, SIGKILL": lambda trial, workers: kill(workers[:2]),
    "all workers at once, SIGKILL": lambda trial, workers: kill(workers),
    "one worker, then another 2 s later": twice,
    "one worker stands still (SIGSTOP) for 3 s": pause,
    "a node, SIGKILL of all its processes; replaced at once": lambda trial, _: trial.replace(1),
    "a node stands still (SIGSTOP of all its processes), replaced after 12 s": suspend_node,
    "all nodes with workers, SIGKILL; replaced after 8 s": lambda trial, _: trial.replace(
        0, 1, after_s=8
    ),
}
HEADER = "| what dies after 1.1 s | seconds | late | restarts | lost |"


def main() -> None:
    with cluster(0) as (address, _):
        trial = Trial(address)
        try:
            print_table(HEADER, CASES, trial.row)
        finally:
            trial.renderer.close()
            for node in trial.nodes:
                kill(processes(node))


if __name__ == "__main__":
    main()
