"""Draws with a Ray cluster of its own, kills workers, and writes what it saw."""

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

from benchmarks.ray_nodes import cluster, named
from rl import build
from rl.api.types import HiddenStates, RenderJob, Sample
from rl.config.schema import load_config
from rl.files import digest
from rl.pool.pooled_renderer import pooled
from rl.ranks.dist import Dist

KEY = "hunter2hunter2"
PAUSE_S = 1.0


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


def main() -> None:
    # Ray's default is a minute, in which the process beside the rank uses both cores.
    os.environ |= {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
    with cluster(3) as (address, _):
        session(address)


def session(address: str) -> None:
    torch.set_num_threads(1)
    pool = ["render_pool.workers=2", f"render_pool.address='{address}'"]
    config = load_config("configs/quickstart.jsonnet", ["renderer.batch_size=3", *pool])
    resolved = build.resolve(config)
    plugin, dist, me = resolved.renderer, Dist(), psutil.Process()
    local = build.build_renderer(resolved, dist)
    assert local.state_dim is not None
    expected = seen(local.render(jobs(local.state_dim)))
    result: dict[str, Any] = {"failures": [text for text in expected if " " in text]}
    os.environ["JUDGE_API_KEY"] = os.environ["HF_TOKEN"] = KEY
    handler = signal.signal(signal.SIGTERM, stop)
    renderer = pooled(plugin, config, dist)
    renderer.wait()
    result["where"] = renderer.where
    result["handler_kept"] = signal.signal(signal.SIGTERM, handler) is stop
    result["equal"] = seen(renderer.render(jobs(local.state_dim))) == expected

    def draw_until(is_enough: Any, pause_s: float = 0.0) -> bool:
        """Whether all calls drew what was expected, until the pool's state is `is_enough`;
        `pause_s`: between two calls, for workers that load meanwhile."""
        began_s, all_equal = time.monotonic(), True
        while not is_enough(renderer._state) and time.monotonic() - began_s < 90:
            all_equal &= seen(renderer.render(jobs(local.state_dim))) == expected
            time.sleep(pause_s)
        return all_equal

    draw_until(lambda state: state.num_ready == 2, PAUSE_S)
    processes = me.children(recursive=True)
    result["with_key"] = [
        child.name() for child in processes if KEY in str(child.environ().values())
    ]
    result["workers"] = len(named(me))
    for count in (1, 2):  # the first worker, which drew the reference, and the other one
        victim = named(me)[0]
        threading.Timer(0.1, victim.kill).start()
        result[f"equal_after_kill_{count}"] = draw_until(
            lambda state, count=count: state.num_lost >= count
        )
        result[f"lost_{count}"] = renderer._state.num_lost
    result["equal_at_the_end"] = draw_until(lambda state: state.num_ready == 2, PAUSE_S)
    result["metrics"] = sorted(renderer.take_metrics())
    own = [*named(me), psutil.Process(renderer._process.pid)]
    threading.Timer(0.1, named(me, "raylet")[0].kill).start()
    try:
        draw_until(lambda state: False, PAUSE_S)
    except RuntimeError as error:
        result["after_raylet"] = str(error)
    renderer.close()
    _, alive = psutil.wait_procs(own, timeout=20)
    result["left"] = [" ".join(child.cmdline())[:80] for child in alive]
    Path(sys.argv[1]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
