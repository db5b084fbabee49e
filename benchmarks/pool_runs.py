"""Ends Ray, or asks the run to stop, in the middle of whole runs with a pool; then resumes them.

    python -m benchmarks.pool_runs --out benchmarks/results/pool_runs.md

Each case trains `quickstart` with two workers for a few iterations; something happens in the fourth
one; the same command then resumes the run. `saved` is the number of iterations in the checkpoint
that the end left; `equal` compares weights, moments, pictures and metrics (times and the pool's own
left out) of the resumed run with those of a run without a pool.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.tiny_loop import assert_same_weights, metrics_of

ROOT = Path(__file__).resolve().parents[1]
ACTS_IN = 3
CONFIG = (
    *("prompts_per_iteration=4", "evaluation.every_n_iterations=3"),
    "engine={type: 'transformers'}",
    *("evaluation.num_samples=4", "checkpoint.save_every_n_iterations=20", "tracking.page=false"),
)
NO_POOL = ("render_pool.workers=0",)
TWO = ("render_pool.workers=2",)


def start(folder: Path, pool: tuple[str, ...], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The run in `folder`, in a process group of its own, as a terminal starts it."""
    command = [sys.executable, "-m", "rl", "train", "configs/quickstart.jsonnet", *CONFIG, *pool]
    with open(folder.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(
            [*command, f"base_exp_dir={folder}"],
            env={**os.environ, **env, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )


def rows_of(folder: Path) -> dict[int, dict[str, Any]]:
    """Iteration -> the metrics that must be equal."""
    with suppress(OSError):
        rows = metrics_of(folder / "quickstart")
        return {
            row["iteration"]: {k: v for k, v in row.items() if "/pool_" not in k} for row in rows
        }
    return {}


def pictures_of(folder: Path) -> dict[str, bytes]:
    files = sorted((folder / "quickstart").rglob("*.png"))
    files = [file for file in files if "set_aside" not in file.parts]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two finished runs."""
    found = []
    left, right = rows_of(one), rows_of(other)
    for iteration in sorted(left.keys() | right.keys()):
        a, b = left.get(iteration, {}), right.get(iteration, {})
        found += [f"{iteration}: {k}" for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
    found += sorted({k for k, _ in pictures_of(one).items() ^ pictures_of(other).items()})
    try:
        assert_same_weights(one / "quickstart", other / "quickstart", saved(other))
    except AssertionError as error:
        found.append(str(error))
    return found


def saved(folder: Path) -> int:
    steps = (folder / "quickstart/checkpoints").glob("step_*")
    return max((int(step.name.removeprefix("step_")) for step in steps), default=0)


def named(process: psutil.Process, name: str) -> psutil.Process:
    """Its descendant whose program is `name`."""
    children = process.children(recursive=True)
    return next(child for child in children if name in child.name())


@contextmanager
def own_cluster(env: dict[str, str]) -> Iterator[psutil.Process]:
    """A head on this machine, as `ray start --head --block` starts it; a run joins it."""
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    env |= {"RAY_ADDRESS": "127.0.0.1:6399", "RAY_USAGE_STATS_ENABLED": "0"}
    env |= {"RAY_worker_register_timeout_seconds": "600"}
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"]
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # nosec B108 # sockets need a short path
        options = ["--port=6399", "--num-cpus=2", f"--temp-dir={folder}"]
        options += ["--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        head = subprocess.Popen(
            [*command, *options], env={**os.environ, **env}, stdout=subprocess.DEVNULL
        )
        try:
            time.sleep(20)
            yield psutil.Process(head.pid)
        finally:
            left = [head.pid, *(each.pid for each in psutil.Process(head.pid).children(True))]
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            head.wait()


Act = Callable[[psutil.Process, psutil.Process], None]


def kill(name: str) -> Act:
    return lambda run, head: named(head, name).kill()


def everything(run: psutil.Process, head: psutil.Process) -> None:
    """The cluster's machine: the head, its node and all workers."""
    for each in [*head.children(recursive=True), head]:
        with suppress(psutil.Error):
            each.kill()


CASES: dict[str, Act] = {
    "SIGTERM to `rl train`": lambda run, head: run.terminate(),
    "Ctrl-C (SIGINT to all of its processes)": lambda run, head: os.killpg(run.pid, 2),
    "the head (GCS) of the cluster": kill("gcs_server"),
    "the rank's node (raylet)": kill("raylet"),
    "all processes of the cluster": everything,
}


def tried(name: str, work: Path, plain: Path, number: str) -> str:
    """A row of the table."""
    folder = work / re.sub(r"\W+", "_", name)
    env: dict[str, str] = {}
    with own_cluster(env) as head:
        process = start(folder, (*TWO, number), env)
        run = psutil.Process(process.pid)
        while ACTS_IN not in rows_of(folder):
            time.sleep(0.2)
            if process.poll() is not None:
                return f"| {name} | did not start: {folder}.log | | | | |"
        time.sleep(0.3)
        children = run.children(recursive=True)
        began_s = time.monotonic()
        CASES[name](run, head)
        code = process.wait(timeout=900)
        seconds = time.monotonic() - began_s
        time.sleep(3)
        left = [each for each in children if each.is_running()]
    iterations, done = saved(folder), max(rows_of(folder))
    with own_cluster(env):
        resumed = start(folder, (*TWO, number), env).wait(timeout=900)
    wrong = differences(folder, plain) if resumed == 0 else [f"exit code {resumed}"]
    print(*wrong[:10], sep="\n", flush=True)
    equal = "no" if wrong else "yes"
    numbers = f"{code} | {seconds:.0f} | {done} | {iterations} | {len(left)} | {equal}"
    return f"| {name} | {numbers} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "pool_runs")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    plain, number = args.work / "plain", f"num_iterations={args.iterations}"
    if not saved(plain):
        start(plain, (*NO_POOL, number), {}).wait()
    lines = [
        "| what happens in iteration 4 | exit code | ends after, s | done | saved "
        "| processes left | equal when resumed |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for name in [name for name in CASES if args.match in name]:
        lines.append(tried(name, args.work, plain, number))
        print(lines[-1], flush=True)
        if args.out:
            args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
