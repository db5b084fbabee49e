"""Ends Ray, or asks the run to stop, in the middle of whole runs with a pool; then resumes them.

    python -m benchmarks.pool_runs > pool_runs.md

Each case trains `quickstart` for five iterations, with two workers of a cluster that is started for
it; something happens in the fourth one; the same command then resumes the run, with another
cluster. `done` is the number of iterations with metrics, `saved` that of the checkpoint which the
end left, and `left` the number of its processes and actors that ran three seconds later. `equal`
compares weights, moments, pictures and metrics (times and the pool's own left out) of the resumed
run with those of a run without a pool.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.ray_nodes import cluster, kill, named, print_table, processes
from tests.helpers.tiny_loop import assert_same_weights, metrics_of

NUM_ITERATIONS, ACTS_AFTER = 5, 3
CONFIG = (
    *("prompts_per_iteration=4", "evaluation.every_n_iterations=3", "evaluation.num_samples=4"),
    *("engine={type: 'transformers'}", f"num_iterations={NUM_ITERATIONS}"),
    *("checkpoint.save_every_n_iterations=20", "tracking.page=false"),
)
WORK = Path(tempfile.gettempdir()) / f"pool_runs_{os.getpid()}"


def start(folder: Path, address: str = "") -> psutil.Popen:
    """The run in `folder`, in a process group of its own, as a terminal starts it; with a pool if
    there is an address."""
    pool = [f"render_pool.workers={2 if address else 0}", f"render_pool.address='{address}'"]
    command = [sys.executable, "-m", "rl", "train", "configs/quickstart.jsonnet", *CONFIG, *pool]
    folder.parent.mkdir(exist_ok=True)
    with open(f"{folder}.log", "ab") as log:
        return psutil.Popen(
            [*command, f"base_exp_dir={folder}"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows that must be equal."""
    with suppress(OSError):
        rows = metrics_of(folder / "quickstart")
        return [{k: v for k, v in row.items() if "/pool_" not in k} for row in rows]
    return []


def pictures(folder: Path) -> dict[str, bytes]:
    files = (folder / "quickstart").rglob("*.png")
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in files
        if "set_aside" not in file.parts
    }


def row(name: str) -> str:
    folder, plain = WORK / re.sub(r"\W+", "_", name), WORK / "plain"
    if not plain.exists():
        start(plain).wait()
    with cluster(2) as (address, head):
        run = start(folder, address)
        while len(metrics(folder)) <= ACTS_AFTER:
            time.sleep(0.2)
            if run.poll() is not None:
                return f"did not start: {folder}.log | | | | |"
        time.sleep(0.3)
        own = [*run.children(recursive=True), *named(head)]
        began_s = time.monotonic()
        CASES[name](run, head)
        code = run.wait(timeout=900)
        seconds = time.monotonic() - began_s
        _, left = psutil.wait_procs(own, timeout=3)
    done = max((row["iteration"] for row in metrics(folder)), default=0)
    steps = (folder / "quickstart/checkpoints").glob("step_*")
    saved = max((int(step.name.removeprefix("step_")) for step in steps), default=0)
    with cluster(2) as (address, _):
        resumed = start(folder, address).wait(timeout=900)
    equal = resumed == 0 and is_equal(folder, plain)
    return f"{code} | {seconds:.0f} | {done} | {saved} | {len(left)} | {equal}"


def is_equal(one: Path, other: Path) -> bool:
    try:
        assert_same_weights(one / "quickstart", other / "quickstart", NUM_ITERATIONS)
    except AssertionError as error:
        print(error)
        return False
    return metrics(one) == metrics(other) and pictures(one) == pictures(other)


CASES: dict[str, Callable[[psutil.Popen, psutil.Popen], None]] = {
    "SIGTERM to `rl train`": lambda run, head: run.terminate(),
    "Ctrl-C (SIGINT to all of its processes)": lambda run, _: os.killpg(run.pid, signal.SIGINT),
    "the head (GCS) of the cluster": lambda _, head: kill(named(head, "gcs_server")),
    "the rank's node (raylet)": lambda _, head: kill(named(head, "raylet")),
    "all processes of the cluster": lambda _, head: kill(processes(head)),
}
HEADER = "| what happens in iteration 4 | exit code | ends after, s | done | saved | left | equal |"

if __name__ == "__main__":
    print_table(HEADER, CASES, row)
