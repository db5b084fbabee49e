"""Draws with a local Ray cluster, kills a worker, and writes what it saw."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from tiny_pictures import make_picture

from rl import build
from rl.api.types import HiddenStates, RenderJob, Sample
from rl.config.schema import RenderPoolConfig, load_config
from rl.files import digest
from rl.pool.ray_cluster import RayWorkers, pooled
from rl.ranks.dist import Dist

KEY = "hunter2hunter2"


def stop(*_: Any) -> None:
    """The run's own answer to SIGTERM."""


def jobs(state_dim: int) -> list[RenderJob]:
    """Two samples of five completions each, and one that cannot be drawn."""
    samples = [Sample(f"s{i}", "paint", sources=(make_picture(i),)) for i in range(2)]
    samples.append(Sample("none", "paint"))
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, sample in enumerate(samples[i] for i in (0, 0, 0, 0, 2, 0, 1, 1, 1, 1, 1)):
        states = torch.randn(6 + number, state_dim, generator=generator)
        made.append(RenderJob(sample, HiddenStates(states), noise_seed=number))
    return made


def seen(drawn: Any) -> list[str]:
    outcomes = dict(drawn)
    return [
        digest(outcome).hex() if hasattr(outcome, "tobytes") else outcome.reason
        for _, outcome in sorted(outcomes.items())
    ]


def listening(process: psutil.Process) -> list[str]:
    """Addresses on which the process's descendants listen."""
    children = process.children(recursive=True)
    sockets = [socket for child in children for socket in child.net_connections()]
    addresses = {socket.laddr.ip for socket in sockets if socket.status == "LISTEN"}
    return sorted({address.removeprefix("::ffff:") for address in addresses})  # IPv4 as IPv6


def main() -> None:
    torch.set_num_threads(1)
    config = load_config("configs/quickstart.jsonnet", ["renderer.batch_size=3"])
    resolved = build.resolve(config)
    plugin, dist, me = resolved.renderer, Dist(), psutil.Process()
    local = build.build_renderer(resolved, dist)
    assert local.state_dim is not None
    expected = seen(local.render(jobs(local.state_dim)))
    result: dict[str, Any] = {"failures": [text for text in expected if " " in text]}
    os.environ["JUDGE_API_KEY"] = KEY
    handler = signal.signal(signal.SIGTERM, stop)
    pool = RenderPoolConfig(workers=2, num_cpus=0.5, address="local")
    renderer = pooled(plugin, pool, dist, set())
    renderer.wait()
    result["where"] = renderer.where
    result["handler_kept"] = signal.signal(signal.SIGTERM, handler) is stop
    result["equal"] = seen(renderer.render(jobs(local.state_dim))) == expected
    dispatcher = renderer._dispatcher
    while len(dispatcher.ready) < 2:  # the second one may still load
        list(renderer.render(jobs(local.state_dim)))
    result["listening"] = listening(me)
    result["with_key"] = [
        child.name() for child in me.children(recursive=True) if KEY in child.environ().values()
    ]
    workers: Any = dispatcher.workers
    pids = [row["pid"] for row in workers.status()]
    for child in me.children(recursive=True):  # as a terminal or a batch system does
        child.terminate()
    result["equal_after_stop"] = seen(renderer.render(jobs(local.state_dim))) == expected
    result["restarts_after_stop"] = dispatcher.restarts
    kept = RayWorkers(pool, workers._spec, detached=True)
    result["states"] = [row["state"] for row in kept.status()]
    kill = threading.Timer(0.1, lambda: os.kill(pids[0], signal.SIGKILL))
    kill.start()
    began_s, all_equal = time.monotonic(), True
    while dispatcher.restarts == 0 and time.monotonic() - began_s < 60:
        all_equal &= seen(renderer.render(jobs(local.state_dim))) == expected
    result |= {"equal_after_kill": all_equal, "restarts": dispatcher.restarts}
    result["metrics"] = sorted(renderer.take_metrics())
    children = me.children(recursive=True)
    renderer.close()
    _, alive = psutil.wait_procs(children, timeout=20)
    result["left"] = [" ".join(child.cmdline())[:80] for child in alive]
    Path(sys.argv[1]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
