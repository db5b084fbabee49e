"""Step 1: driver, compiler, headers, memory, disk and what a config needs; no kernel runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rl import build
from rl.check import check_report, this_machine
from rl.check_gpu.lines import NEEDS_CUDA, Asked, Line, failed, ok, skipped
from rl.config.schema import ConfigError, load_config
from rl.ranks.placement import Machine

MIN_CAPABILITY, MIN_GPU_GB = 8.0, 15.5
"""Ampere, for bfloat16 and flash attention; a "16 GB" GPU has at least so many."""
MIN_DISK_GB = 2.0
"""Room for the small runs of this command; a config's checkpoints are counted by its own line."""
FIELDS = "name,driver_version,compute_cap,memory.total,memory.used"


@dataclass(frozen=True)
class Gpu:
    name: str
    driver: str
    capability: float
    total_gb: float
    used_gb: float


def gpus() -> tuple[list[Gpu], str]:
    """(the visible GPUs, '') by nvidia-smi, or ([], why there are none)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return [], f"CUDA_VISIBLE_DEVICES={visible!r} hides all GPUs"
    only = [] if visible is None else ["-i", visible]
    rows, why = _nvidia_smi(f"--query-gpu={FIELDS}", *only)
    return [_gpu(row) for row in rows if len(row) == len(FIELDS.split(","))], why


def _gpu(row: list[str]) -> Gpu:
    name, driver, capability, total, used = row
    return Gpu(name, driver, _number(capability), _mib(total), _mib(used))


def _number(word: str) -> float:
    return float(word) if word.replace(".", "", 1).isdecimal() else 0.0


def _mib(word: str) -> float:
    return _number(word) * 2**20 / 1e9


def _nvidia_smi(*options: str) -> tuple[list[list[str]], str]:
    """(rows of its answer, '') or ([], why there is none)."""
    command = ["nvidia-smi", *options, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return [], "there is no nvidia-smi, so no NVIDIA driver is installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi gives no answer ({type(error).__name__})"
    lines = [line.strip() for line in done.stdout.split("\n") if line.strip()]
    if done.returncode != 0:
        said = [*lines, *done.stderr.split("\n")][0]
        return [], f"nvidia-smi fails: {said or f'exit code {done.returncode}'}"
    return [[word.strip() for word in line.split(",")] for line in lines], ""


def machine(asked: Asked) -> Iterator[Line]:
    if asked.tiny:
        for what in ("driver", "GPU memory", "PyTorch and the GPU", "peer access"):
            yield skipped(what, NEEDS_CUDA)
    else:
        found, why = gpus()
        yield from driver(found, why)
        yield from [gpu_memory(i, gpu) for i, gpu in enumerate(found)]
        yield from pytorch(len(found))
    yield from compiler(asked)
    yield shared_memory(asked.num_ranks)
    yield disk(Path(asked.folder))
    yield from config_lines(asked)


def driver(found: list[Gpu], why: str) -> Iterator[Line]:
    if not found:
        yield failed("driver", why, f"install NVIDIA driver {this_machine.MIN_DRIVER} or newer")
        return
    version = found[0].driver
    names = ", ".join(f"{sum(g.name == n for g in found)} x {n}" for n in {g.name for g in found})
    if problems := list(this_machine.driver_problems(version, found[0].capability)):
        yield failed("driver", f"{version} for {names}", problems[0])
    else:
        yield ok("driver", f"{version}, {names}")
    old = [gpu for gpu in found if gpu.capability < MIN_CAPABILITY]
    if old:
        note = f"{old[0].name} has {old[0].capability}, bfloat16 kernels need {MIN_CAPABILITY}"
        yield failed("compute capability", note, "use an A100, RTX 30 or newer")


def gpu_memory(index: int, gpu: Gpu) -> Line:
    what = f"memory of GPU {index}"
    note = f"{gpu.total_gb:.1f} GB, {gpu.used_gb:.1f} GB of them used"
    if gpu.total_gb < MIN_GPU_GB:
        return failed(what, note, "use a GPU of 16 GB or more")
    if gpu.used_gb <= this_machine.BUSY_GB:
        return ok(what, note)
    rows, _ = _nvidia_smi("--query-compute-apps=pid,used_memory", "-i", _smi_index(index))
    pids = f" by process {', '.join(row[0] for row in rows)}" if rows else " by other processes"
    return failed(what, note + pids, "end them, or choose other GPUs by CUDA_VISIBLE_DEVICES")


def _smi_index(index: int) -> str:
    """nvidia-smi counts all GPUs, CUDA the visible ones."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index].strip() if visible else str(index)


def pytorch(num_gpus: int) -> Iterator[Line]:
    """Whether PyTorch can use the GPUs that nvidia-smi lists, and how they reach each other."""
    import torch

    what, fix = "PyTorch and the GPU", "install requirements.lock into a new .venv"
    if not torch.cuda.is_available():
        build = torch.version.cuda or "CPUs"
        yield failed(what, f"torch {torch.__version__} for {build} sees no GPU", fix)
        return
    count = torch.cuda.device_count()
    note = f"torch {torch.__version__}, CUDA {torch.version.cuda}, {count} GPUs"
    yield ok(what, note) if count == num_gpus else failed(what, f"{note} of {num_gpus}", fix)
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    without = [f"{i}-{j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    if not pairs:
        yield skipped("peer access", "one GPU")
    elif without:
        yield ok("peer access", f"none between {', '.join(without)}: copies go through the host")
    else:
        yield ok("peer access", f"all {len(pairs)} pairs")


def compiler(asked: Asked) -> Iterator[Line]:
    problems = list(this_machine.toolchain_problems())
    for what, word in (("compiler", "compiler ("), ("Python headers", "Python.h")):
        wrong = [problem for problem in problems if word in problem]
        if not wrong:
            yield ok(what)
        elif asked.tiny:
            yield skipped(what, f"not found; only Triton needs it, and that {NEEDS_CUDA}")
        else:
            note, _, fix = wrong[0].removeprefix("this machine: ").rpartition(": ")
            yield failed(what, note, fix)


def shared_memory(num_ranks: int) -> Line:
    what, least_gb = this_machine.SHARED, this_machine.MIN_SHARED_GB
    if not os.path.isdir(what):
        return skipped(what, "this system has none")
    size_gb = shutil.disk_usage(what).total / 1e9
    note = f"{size_gb:.3g} GB"
    if size_gb < least_gb and num_ranks > 1:
        fix = "start the container with --ipc=host or --shm-size=16g"
        return failed(what, f"{note}, and NCCL wants {least_gb:g} GB for several ranks", fix)
    return ok(what, note)


def disk(folder: Path) -> Line:
    free_gb = this_machine.free_gb(folder)
    note = f"{free_gb:.3g} GB free for temporary files"
    if free_gb < MIN_DISK_GB:
        fix = "make room, or set TMPDIR to a folder on a larger disk"
        return failed("disk", f"{note}, this command needs {MIN_DISK_GB:g}", fix)
    return ok("disk", note)


def config_lines(asked: Asked) -> Iterator[Line]:
    """Whether this machine has what the given config needs, by its memory plan."""
    what = "the config's plan"
    if not asked.config:
        yield skipped(what, "no config given: rl check-gpu configs/<name>.jsonnet")
        return
    size = [] if asked.tiny else [f"gpu_gb={asked.gpu_gb:.0f}", f"world_size={asked.num_gpus}"]
    try:
        config = load_config(asked.config, [*size, *asked.overrides])
        resolved = build.resolve(config)
    except ConfigError as error:
        yield failed(what, "; ".join(error.problems)[:300], "rl check <config> lists all problems")
        return
    here = Machine((asked.gpu_gb,) * asked.num_gpus)
    host_gb = this_machine.host_memory_gb()
    problems = check_report.problems_here(config, here, config.world_size, host_gb)
    for problem in problems:
        name, _, words = problem.partition(": ")
        note, _, fix = words.rpartition("; ")
        yield failed(f"{what}, {name}", note or words, fix or "rl check <config> says more")
    if not problems:
        note = this_machine.disk_line(resolved).partition(" at ")[0]
        yield ok(what, f"fits {config.world_size} ranks and {host_gb or 0:.0f} GB of host; {note}")
