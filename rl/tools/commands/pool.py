"""Keep the workers of a render pool between runs, on a Ray cluster that is running.

    rl pool start configs/qwen_image_edit.jsonnet render_pool.workers=16
    rl pool status configs/qwen_image_edit.jsonnet
    rl pool stop configs/qwen_image_edit.jsonnet

start loads the renderer in every worker and leaves them running, so that a run (or a
resumed run) of the same renderer finds them ready; status prints one line per worker;
stop ends them. A run without a started pool starts workers itself, and they end with
it. The cluster is the one of this machine or render_pool.address (docs/scale.md);
`rl check` says how many workers help.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl import build, printing
from rl.config.schema import ConfigError, load_config
from rl.ranks.dist import Dist

if TYPE_CHECKING:
    from rl.config.schema import RenderPoolConfig
    from rl.pool.ray_cluster import RayWorkers

LOOK_EVERY_S = 5.0


@printing.program
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 a worker cannot load the renderer, 2 wrong usage or no cluster."""
    printing.guard()
    usage = "rl pool start|status|stop config [key=value ...]"
    parser = printing.Parser("rl pool", f"{__doc__}{printing.KEY_VALUE}", usage)
    actions = parser.add_subparsers(dest="action", required=True, metavar="action", prog="rl pool")
    for action in ("start", "status", "stop"):
        its = actions.add_parser(action, doc=__doc__)
        its.add_config()
    args = parser.parse_args(argv)
    config = load_config(args.config, args.overrides)
    resolved = build.resolve(config)
    pool = config.render_pool
    if args.action == "start" and not pool.workers:
        raise ConfigError(["render_pool.workers: 0 starts nothing; give a number, or 'auto'"])
    try:
        workers = _connected(resolved, pool)
        if args.action == "stop":
            printing.show(f"{workers.stop()} actors of {workers.name} ended")
            return 0
        return _start(workers, pool) if args.action == "start" else _print(workers)
    except ValueError as error:
        printing.complain(str(error))
        return 2


def _connected(resolved: build.Resolved, pool: RenderPoolConfig) -> RayWorkers:
    from rl.pool import ray_cluster
    from rl.pool.pool_worker import spec_of

    where = ray_cluster.connect(pool.address, Dist(), may_start=False)
    printing.show(f"on {where}")
    renderer = resolved.renderer
    on_gpu = ray_cluster.has_gpus() and resolved.policy.config.device != "cpu"
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))  # a CPU run's
    spec = spec_of(renderer.cls, renderer.config, threads, "cuda:0" if on_gpu else "cpu")
    return ray_cluster.RayWorkers(pool, spec, detached=True)


def _start(workers: RayWorkers, pool: RenderPoolConfig) -> int:
    """Wait until every worker has loaded the renderer, or one cannot, at most `max_wait_s`."""
    ends_s = time.monotonic() + pool.max_wait_s
    while time.monotonic() < ends_s:
        states = [row["state"] for row in workers.status()]
        if workers.OF_A_RUN in states:
            raise ValueError(
                f"render_pool.name: a run has started workers of {workers.name}, which end with "
                "it; wait for its end, or choose another name here and in later runs"
            )
        if len(workers.names()) == len(states) and set(states) == {"ready"}:  # starts missing ones
            return _print(workers)
        if any(state not in ("ready", workers.LOADING) for state in states):
            break
        printing.show(f"{states.count('ready')} of {len(states)} workers are ready")
        time.sleep(LOOK_EVERY_S)
    _print(workers)
    return 1


def _print(workers: RayWorkers) -> int:
    rows = workers.status()
    if not rows:
        printing.show(f"no worker of {workers.name} exists; `rl pool start` starts them")
    for row in rows:
        place = f"  {row['node']} pid {row['pid']}" if "node" in row else ""
        printing.show(f"{row['worker']}  {row['state']}{place}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
