"""Times a render pool of 1 to 8 sleeping workers beside the formula of `rl check`.

    python -m benchmarks.pool_scaling --out benchmarks/results/pool_scaling.md

A picture sleeps 0.25 s, so that eight workers need no eight cores. Then 300 messages of 4 MB of
states are sent through one worker that draws at once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.sleeping_renderer import Config, SleepingRenderer
from rl.api.types import HiddenStates, RenderJob, Sample
from rl.check.iteration_time import Iteration
from rl.config.schema import RenderPoolConfig
from rl.pool import ray_cluster
from rl.pool.dispatch import Dispatcher
from rl.pool.pool_worker import facts_of_code, spec_of
from rl.ranks.dist import Dist

NUM_PICTURES, TRIES = 64, 3


def dispatcher_of(workers: int, config: Config) -> tuple[Dispatcher, ray_cluster.RayWorkers]:
    pool = RenderPoolConfig(workers=workers, address="local", num_cpus=0)
    spec = spec_of(SleepingRenderer, config, 1, "cpu")
    handles = ray_cluster.RayWorkers(pool, spec)
    batch_of = SleepingRenderer.batch_of
    return Dispatcher(
        handles, pool, lambda job: batch_of(config, job), facts_of_code(spec)
    ), handles


def timed(dispatcher: Dispatcher, jobs: Iterator[RenderJob]) -> float:
    began_s = time.monotonic()
    for _ in dispatcher.render(jobs):
        pass
    return time.monotonic() - began_s


def jobs(count: int) -> Iterator[RenderJob]:
    for number in range(count):
        yield RenderJob(Sample(str(number // 8), "x"), "words", number)


def scaling() -> Iterator[str]:
    yield "| workers | ready after, s | measured, s (best of 3) | spread, s | computed, s |"
    yield "|---:|---:|---:|---:|---:|"
    for count in range(1, 9):
        config = Config(type="benchmarks.sleeping_renderer", load_s=0.001 * count)
        began_s = time.monotonic()
        dispatcher, handles = dispatcher_of(count, config)
        while len(dispatcher.ready) < count:
            timed(dispatcher, jobs(config.batch_size * count))
        ready_s = time.monotonic() - began_s
        seconds = [timed(dispatcher, jobs(NUM_PICTURES)) for _ in range(TRIES)]
        work = Iteration(
            1, NUM_PICTURES // 8, 8, config.batch_size, 0, 0, 0, config.seconds, 0, 0, 0,
            workers=count,
        )  # fmt: skip
        yield (
            f"| {count} | {ready_s:.1f} | {min(seconds):.2f} | {max(seconds) - min(seconds):.2f} "
            f"| {work.total_s:.2f} |"
        )
        handles.stop()


def transfer() -> Iterator[str]:
    config = Config(type="benchmarks.sleeping_renderer", seconds=0, batch_size=1)
    dispatcher, handles = dispatcher_of(1, config)
    timed(dispatcher, jobs(8))
    states = [HiddenStates(torch.randn(512, 4096, dtype=torch.bfloat16)) for _ in range(300)]
    sample = Sample("a", "x")
    sent = (RenderJob(sample, each, number) for number, each in enumerate(states))
    dispatcher.take_metrics()
    seconds = timed(dispatcher, sent)
    megabytes = dispatcher.take_metrics()["pool_mb"]
    yield f"{megabytes / 300:.2f} MB a picture, {megabytes / seconds:.0f} MB/s on one machine."
    handles.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began_s = time.monotonic()
    ray_cluster.connect("local", Dist())
    lines = [f"Ray started in {time.monotonic() - began_s:.1f} s.", ""]
    for part in (scaling, transfer):
        for line in part():
            lines.append(line)
            print(line, flush=True)
            if args.out:
                args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
        lines.append("")
    ray_cluster.disconnect()


if __name__ == "__main__":
    main()
