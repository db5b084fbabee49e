"""Steps 3 and 5: collectives between the ranks; two runs, killed and resumed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rl.check_gpu.lines import Asked, Line, failed, ok, skipped, work_folder
from rl.checkpoints.checkpoint import find, iteration_of
from rl.files.atomic import read_rows

RANK_SCRIPT = Path(__file__).parents[1] / "commands" / "check_distributed.py"
NUM_ITERATIONS = 3
"""The run is killed after its first checkpoint; the resumed one has two iterations to do."""
SMALL = (
    "generations_per_prompt=4",
    f"num_iterations={NUM_ITERATIONS}",
    "evaluation.every_n_iterations=0",
    "data.validation=[]",
    "optimizer.warmup_iterations=0",
    "checkpoint.save_every_n_iterations=1",
)
NO_SUM = "NCCL_DEBUG=INFO tells more; NCCL_P2P_DISABLE=1 rules out peer access"


def launcher(*words: str) -> list[str]:
    isolated = ["-P"] if sys.flags.safe_path else []
    return [sys.executable, *isolated, "-m", "rl.simple_launch", *words]


# Collectives


def collectives(asked: Asked, script: Path = RANK_SCRIPT) -> Iterator[Line]:
    """`rl check-distributed` on all ranks, with its timed sum."""
    if asked.num_ranks == 1:
        yield skipped("collectives", "one GPU: no other rank to sum with")
        return
    command = launcher("--nproc", str(asked.num_ranks), str(script))
    done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stdout.split("\n"):
        name, _, note = line.partition(": ")
        if line.endswith("is successful!"):
            yield ok(f"{line.removesuffix(' is successful!')} sum", f"{asked.num_ranks} ranks")
        elif " skipped: " in line:
            name, _, note = line.partition(" skipped: ")
            yield skipped(f"{name} sum", note)
        elif " GB/s" in line:
            yield ok(name, note)
    if done.returncode != 0:
        said = [line for line in done.stderr.split("\n") if "rank" in line or "sums" in line]
        note = said[0] if said else f"exit code {done.returncode}"
        yield failed("collectives", note.partition(" (if the network")[0], NO_SUM)


# The loop


def quickstart(asked: Asked) -> Iterator[Line]:
    return loop(asked, "quickstart")


def image_21(asked: Asked) -> Iterator[Line]:
    return loop(asked, "tiny_qwen_image_21")


def loop(asked: Asked, name: str, *more: str) -> Iterator[Line]:
    """Starts the shipped config, kills it with SIGKILL after its first checkpoint, and starts the
    same command again."""
    path, *words = asked.words_of(name)
    num_ranks = 1 if asked.tiny else asked.num_ranks
    if num_ranks > 1:
        words.append("optimizer.backend=deepspeed")
    words += [*SMALL, f"world_size={num_ranks}", "renderer.batch_size=8", *more]
    words += [f"prompts_per_iteration={4 * num_ranks}"]
    run_dir, logs = Path(asked.folder, "runs", name), work_folder(asked, "logs")
    shutil.rmtree(run_dir, ignore_errors=True)
    what = f"loop of {name}: "
    log = logs / f"{name}.log"
    start_s = time.perf_counter()
    code = _until_saved(launcher(path, *words), run_dir, log)
    if code is not None:
        yield failed(f"{what}start", _reason(log, code), "the last words name the key to change")
        return
    took_s = time.perf_counter() - start_s
    yield ok(f"{what}start", f"{num_ranks} ranks, first checkpoint after {took_s:.0f} s")
    start_s, saved = time.perf_counter(), _saved(run_dir)
    with log.open("wb") as file:
        resumed = subprocess.run(launcher(path, *words), stdout=file, stderr=file)
    took_s = time.perf_counter() - start_s
    if resumed.returncode != 0:
        fix = "send this report and the run's log with an issue; a run here cannot go on"
        yield failed(f"{what}resume", _reason(log, resumed.returncode), fix)
        return
    rows, _ = read_rows(run_dir / "metrics.jsonl")
    done = sorted({int(row["iteration"]) for row in rows if "loss/total" in row})
    note = f"killed after iteration {saved}, {len(done)} of {NUM_ITERATIONS} done"
    wrong = [row for row in rows if row.get("loss/total") != row.get("loss/total")]
    if len(done) != NUM_ITERATIONS or wrong:
        yield failed(f"{what}resume", note, "send this report with an issue")
        return
    yield ok(f"{what}resume", f"{note}, {took_s:.0f} s")


def _saved(run_dir: Path) -> int:
    newest = find(run_dir, hashes=False).path if run_dir.is_dir() else None
    return 0 if newest is None else iteration_of(newest)


def _until_saved(command: list[str], run_dir: Path, log: Path) -> int | None:
    """Starts it, and kills it with all of its ranks after its first checkpoint: None; or the exit
    code if it ended before."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            while process.poll() is None:
                if _saved(run_dir):
                    break
                time.sleep(0.05)
        finally:
            ranks = _children(process.pid)
            for pid in [process.pid, *ranks] if process.poll() is None else []:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    return process.returncode if process.returncode != -signal.SIGKILL else None


def _children(pid: int) -> list[int]:
    """The processes that `pid` started."""
    file = Path(f"/proc/{pid}/task/{pid}/children")
    with suppress(OSError):
        return [int(word) for word in file.read_text().split()]
    return []


def _reason(log: Path, code: int) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").split("\n") if line.strip()]
    errors = [line for line in lines if re.match(r"([\w.]*(Error|Exception)\b|- )", line)]
    words = ([*lines[-1:], *errors[-1:]] or ["no output"])[-1]
    return f"exit code {code}; {words[:300]}"
