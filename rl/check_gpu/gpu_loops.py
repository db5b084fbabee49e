"""Steps 3 and 5: collectives between the ranks; two runs, each killed and resumed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rl.check_gpu.lines import Asked, Line, result, skipped
from rl.check_gpu.steps import FIXES, kill, last_words
from rl.checkpoints.checkpoint import find, iteration_of
from rl.files.atomic import read_rows

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
    "renderer.batch_size=8",
    "tracking.page=false",
]


def collectives(asked: Asked, script: Path = RANK_SCRIPT) -> Iterator[Line]:
    """What `rl check-distributed` prints."""
    num_ranks = 2 if asked.tiny else asked.num_gpus
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


def loop(asked: Asked, name: str, *more: str) -> Iterator[Line]:
    """The same command twice; the first run is killed with SIGKILL."""
    num_ranks, run_dir = max(1, asked.num_gpus), Path(asked.folder, "runs", name)
    path, *words = asked.words(name)
    words += [*SMALL, f"world_size={num_ranks}", f"prompts_per_iteration={4 * num_ranks}", *more]
    words += ["optimizer.backend=deepspeed"] if num_ranks > 1 else []
    shutil.rmtree(run_dir, ignore_errors=True)
    log, fix = Path(asked.folder, f"{name}.log"), "rl train with this config shows all of it"
    what = f"loop of {name}, "
    start_s = time.perf_counter()
    with log.open("wb") as file:
        code = _run([*LAUNCH, path, *words], run_dir, file)
    note = f"{num_ranks} ranks, checkpoint 1 after {time.perf_counter() - start_s:.0f} s"
    killed = code == -signal.SIGKILL
    yield result(f"{what}started", killed, note if killed else _last_of(log), fix)
    if not killed:
        return
    start_s = time.perf_counter()
    with log.open("wb") as file:
        code = subprocess.call([*LAUNCH, path, *words], stdout=file, stderr=file)
    rows, _ = read_rows(run_dir / "metrics.jsonl")
    done = {row["iteration"] for row in rows if "loss/total" in row}
    note = f"{len(done)} of {NUM_ITERATIONS} iterations, {time.perf_counter() - start_s:.0f} s"
    good = code == 0 and len(done) == NUM_ITERATIONS
    yield result(f"{what}killed and resumed", good, note if good else _last_of(log), fix)


def _run(command: list[str], run_dir: Path, log: object) -> int:
    """The exit code; with all of its ranks it is killed after its first checkpoint."""
    process = subprocess.Popen(command, stdout=log, stderr=log)  # type: ignore[call-overload]
    while process.poll() is None:
        newest = find(run_dir, hashes=False).path if run_dir.is_dir() else None
        if newest is not None and iteration_of(newest) > 0:
            # Not the judge and its guard, which end by themselves when a run is gone.
            ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            kill(process.pid, *map(int, ranks))
            process.wait()
        time.sleep(0.05)
    return int(process.returncode)


def _last_of(log: Path) -> str:
    return last_words(log.read_text(errors="replace"))


quickstart = partial(loop, name="quickstart")
image_21 = partial(loop, name="tiny_qwen_image_21")
