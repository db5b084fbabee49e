"""Steps `collectives`, and `loop_*`: small runs, each killed and resumed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rl.check_gpu.lines import Line, Setup, measured, result, skipped
from rl.check_gpu.steps import FIXES, kill, last_words
from rl.files import read_rows
from rl.ranks.signals import die_with_parent
from rl.record.checkpoint import find, iteration_of

RANK_SCRIPT = Path(__file__).parents[1] / "commands" / "check_distributed.py"
LAUNCH = [sys.executable, *["-P"] * sys.flags.safe_path, "-m", "rl.simple_launch"]
NUM_ITERATIONS = 3
"""The run is killed after the first one's checkpoint, and then has two iterations to do."""
SMALL = [
    "generations_per_prompt=4",
    f"num_iterations={NUM_ITERATIONS}",
    "evaluation.every_n_iterations=0",
    "data.validation=[]",
    "optimizer.warmup_iterations=0",
    "checkpoint.save_every_n_iterations=1",
    "tracking.page=false",
]
KEPT = ("time/", "memory/", "loss/", "sync/", "mismatch/", "reward/mean", "work/")
"""Metrics of the last iteration that are recorded: those that begin so."""
SHOWN = ("time/iteration_s", "sync/mean_abs_dlogp", "mismatch/k3", "memory/peak_gb")


def collectives(setup: Setup, script: Path = RANK_SCRIPT) -> Iterator[Line]:
    """What `rl check-distributed` prints."""
    num_ranks = 2 if setup.tiny else setup.num_gpus
    if num_ranks == 1:
        yield skipped("sum over all ranks", "one GPU")
        return
    command = [*LAUNCH, "--nproc", str(num_ranks), str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    for line in filter(None, done.stdout.split("\n")):
        what, _, why = line.partition(" skipped: ")
        yield skipped(f"sum by {what}", why) if why else result(f"{num_ranks} ranks", True, line)
    if done.returncode != 0:
        lines = [line for line in done.stderr.split("\n") if " rank" in f" {line}"]
        note = (lines or [last_words(done.stderr)])[0].partition(";")[0].partition(" (")[0]
        yield result("sum over all ranks", False, note, FIXES["NCCL"])


def loop(setup: Setup, name: str, *more: str) -> Iterator[Line]:
    """The same command twice; the first run is killed with SIGKILL. Then the times, memory and
    differences that the last iteration measured."""
    num_ranks, run_dir = max(1, setup.num_gpus), Path(setup.folder, "runs", name)
    command = [*LAUNCH, *words_of(setup, name, *more)]
    shutil.rmtree(run_dir, ignore_errors=True)
    log, fix = Path(setup.folder, "run.log"), "rl train with this config shows all of it"
    what = f"loop of {name}, "
    start_s = time.perf_counter()
    with log.open("wb") as file:
        code = _killed_after_a_checkpoint(command, run_dir, file)
    note = f"ranks: {num_ranks}, checkpoint 1 after {time.perf_counter() - start_s:.0f} s"
    killed = code == -signal.SIGKILL
    yield result(f"{what}started", killed, note if killed else _last_of(log), fix)
    if not killed:
        return
    start_s = time.perf_counter()
    with log.open("wb") as file:
        code = _start(command, file).wait()
    rows, _ = read_rows(run_dir / "metrics.jsonl")
    rows = [row for row in rows if "loss/total" in row]
    num_done = len({row["iteration"] for row in rows})
    note = f"{num_done} of {NUM_ITERATIONS} iterations, {time.perf_counter() - start_s:.0f} s"
    good = code == 0 and num_done == NUM_ITERATIONS
    yield result(f"{what}killed and resumed", good, note if good else _last_of(log), fix)
    if good:
        data = {key: value for key, value in rows[-1].items() if key.startswith(KEPT)}
        note = ", ".join(f"{key} {data[key]:.2g}" for key in SHOWN if key in data)
        yield measured(f"{what}last iteration", note, **data)


def words_of(setup: Setup, name: str, *more: str) -> list[str]:
    """Config and overrides of a small run on all GPUs."""
    num_ranks = max(1, setup.num_gpus)
    backend = ["optimizer.backend=deepspeed"] if num_ranks > 1 else []
    sizes = [f"world_size={num_ranks}", f"prompts_per_iteration={4 * num_ranks}"]
    return setup.words(name, *SMALL, *sizes, *backend, *more)


def _start(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """A run that ends if this process does, however it does."""
    return subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent)


def _killed_after_a_checkpoint(command: list[str], run_dir: Path, log: IO[bytes]) -> int:
    """The exit code of a run that is killed, with all of its ranks."""
    process = _start(command, log)
    while process.poll() is None:
        newest = find(run_dir, hashes=False).path if run_dir.is_dir() else None
        if newest is not None and iteration_of(newest) > 0:
            # Not the judge and its guard, which end by themselves when a run is gone.
            ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            kill(process.pid, *map(int, ranks))
            process.wait()
        time.sleep(0.05)
    return process.returncode


def _last_of(log: Path) -> str:
    return last_words(log.read_text(errors="replace"))
