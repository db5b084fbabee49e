"""Predict how long an iteration takes with render workers, and where the time goes.

Times come from the models' FLOPs or, with --run, from a run's own metrics.

rl pool plan configs/qwen_image_edit.jsonnet
rl pool plan my.jsonnet --run runs/my --workers 4 8 --judges 1 2
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rl import build, printing
from rl.check import iteration_time
from rl.check.iteration_time import (
    MOST_WORKERS,
    WORTH_IT,
    Iteration,
    Machines,
    bound_by,
    enough_workers,
    simulate,
)
from rl.config.schema import load_config

SHARES = (" gen", "cond", "rend", "wait", "learn", "sync", "draw", "judge")
LEGEND = """\
gen ... sync: share of the seconds in time/<phase>_s of the slowest rank, in %
(generate, condition, render, judge_wait, learn, sync; waits included).
draw, judge: share of the time in which workers and judges are busy, in %.
bound by: what, made 10 % faster, shortens the iteration most."""


def add_arguments(parser: printing.Parser) -> None:
    parser.add_config()
    parser.add_argument("--run", type=Path, metavar="DIR", help="a run whose ranks drew: its times")
    powers = [0, *(2**n for n in range(MOST_WORKERS.bit_length()))]
    parser.add_argument(
        "--workers", type=int, nargs="+", default=powers, metavar="N", help="GPUs that only draw"
    )
    parser.add_argument(
        "--judges", type=int, nargs="+", default=[1], metavar="N", help="judges, each as described"
    )
    parser.add_argument(
        "--gbit", type=float, default=10.0, help="Gbit/s from a node of ranks to the workers"
    )
    parser.add_argument("--local", action="store_true", help="the ranks draw, too")


def main(args: argparse.Namespace) -> int:
    """Exit code 0; errors are ValueError."""
    if min(args.workers) < 0 or max(args.workers) > MOST_WORKERS:
        raise ValueError(f"--workers: 0 to {MOST_WORKERS} are simulated")
    if min(args.judges) < 1 or args.gbit <= 0:
        raise ValueError("--judges and --gbit: more than 0")
    resolved = build.resolve(load_config(args.config, args.overrides))
    times = (
        iteration_time.computed(resolved)
        if args.run is None
        else iteration_time.measured(resolved, args.run)
    )
    for line in described(times):
        print(line)
    printing.show(f"workers judges seconds {' '.join(SHARES)} bound by", "bold")
    plan = Machines(bytes_per_s=args.gbit * 1e9 / 8, local=args.local)
    for judges in args.judges:
        machines = replace(plan, judge_slots=judges * times.slots_per_judge)
        enough = enough_workers(times.iteration, machines)
        for workers in sorted({*args.workers, enough}):
            print(row(times.iteration, replace(machines, workers=workers), judges))
        print(f"beyond {enough} workers, further ones together save less than {WORTH_IT:.0%}\n")
    print(LEGEND)
    return 0


def described(times: iteration_time.Times) -> Iterator[str]:
    """Lines that say what is simulated."""
    work = times.iteration
    pictures = work.num_ranks * work.num_pictures
    yield (
        f"ranks: {work.num_ranks}; pictures: {pictures}, in batches of {work.batch_size}; "
        f"questions about each: {work.questions}"
    )
    yield f"times: {times.source}"
    yield (
        f"a picture: {work.draw_s:.3g} s of a GPU, {work.picture_bytes / 1e6:.3g} MB to and from a "
        "worker"
    )
    questions = "questions" if times.slots_per_judge > 1 else "question"
    yield f"a judge: {times.slots_per_judge} {questions} at once, each in {work.judge_s:.3g} s"
    if times.measured_s is not None:
        alone = simulate(work, Machines(judge_slots=times.slots_per_judge)).total_s
        yield f"an iteration took {times.measured_s:.3g} s; simulated, without workers: {alone:.3g}"


def row(work: Iteration, machines: Machines, judges: int) -> str:
    """A line of the table."""
    outcome = simulate(work, machines)
    shares = [seconds / outcome.total_s for seconds in outcome.phases_s.values()]
    shares += [outcome.worker_use, outcome.judge_use]
    numbers = [f"{machines.workers:>7} {judges:>6} {outcome.total_s:>7.5g}"]
    numbers += [f"{100 * s:>{len(name)}.0f}" for s, name in zip(shares, SHARES, strict=True)]
    return " ".join([*numbers, bound_by(work, machines)])
