"""Step 1: driver, compiler, headers, memory, disk, and what a config needs; runs no kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from rl import build
from rl.check import check_report, this_machine
from rl.check.this_machine import MIN_DRIVER, MIN_SHARED_GB, SHARED
from rl.check_gpu.lines import Asked, Line, result, skipped
from rl.config.schema import ConfigError, load_config
from rl.ranks.placement import Machine

MIN_CAPABILITY, MIN_GPU_GB = 8.0, 15.5
"""Ampere, for bfloat16 and flash attention; a "16 GB" GPU has at least so many."""
MIN_DISK_GB = 2.0
"""For the small runs of this command."""
FIELDS = "name,driver_version,compute_cap,memory.total,memory.used"


class Gpu(NamedTuple):
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
    only = ["-i", visible] if visible else []
    rows, why = _nvidia_smi(f"--query-gpu={FIELDS}", *only)
    numbers = [[float(w) if w.replace(".", "").isdecimal() else 0.0 for w in r[2:]] for r in rows]
    found = [
        Gpu(row[0], row[1], capability, total * 2**20 / 1e9, used * 2**20 / 1e9)
        for row, (capability, total, used) in zip(rows, numbers, strict=True)
    ]
    return found, why


def _nvidia_smi(*options: str) -> tuple[list[list[str]], str]:
    """(rows of its answer, '') or ([], why there is none)."""
    command = ["nvidia-smi", *options, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi gives no answer: {type(error).__name__}"
    lines = [line for line in done.stdout.split("\n") if line.strip()]
    if done.returncode != 0:
        return [], f"nvidia-smi fails: {[*lines, *done.stderr.split(chr(10))][0].strip()}"
    return [[word.strip() for word in line.split(",")] for line in lines], ""


def machine(asked: Asked) -> Iterator[Line]:
    if asked.tiny:
        yield from map(skipped, ("driver", "GPU memory", "PyTorch", "peer access"))
    else:
        found, _ = gpus()
        yield driver(found)
        yield from [gpu_memory(index, gpu) for index, gpu in enumerate(found)]
        yield from pytorch(len(found))
    yield from toolchain(asked)
    yield shared_memory(asked)
    free_gb = this_machine.free_gb(Path(asked.folder))
    fix = "make room, or set TMPDIR to a folder on a larger disk"
    yield result("disk", free_gb >= MIN_DISK_GB, f"{free_gb:.3g} GB free in TMPDIR", fix)
    yield from config_lines(asked)


def driver(found: list[Gpu]) -> Line:
    names = ", ".join(gpu.name for gpu in found)
    weakest = min(gpu.capability for gpu in found)
    note = f"{found[0].driver}; {names}; compute capability {weakest}"
    if weakest < MIN_CAPABILITY:
        return result("driver", False, note, f"use GPUs of compute capability {MIN_CAPABILITY}")
    problems = list(this_machine.driver_problems(found[0].driver, weakest))
    return result("driver", not problems, note, f"install driver {MIN_DRIVER} or newer")


def gpu_memory(index: int, gpu: Gpu) -> Line:
    note, fix = f"{gpu.total_gb:.1f} GB, {gpu.used_gb:.1f} GB of it in use", ""
    if gpu.total_gb < MIN_GPU_GB:
        fix = "use a GPU of 16 GB or more"
    elif gpu.used_gb > this_machine.BUSY_GB:
        number = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[index:][:1] or [str(index)]
        rows, _ = _nvidia_smi("--query-compute-apps=pid,used_memory", "-i", number[0])
        note += f" by processes {', '.join(row[0] for row in rows) or 'that it does not name'}"
        fix = "end them, or choose other GPUs by CUDA_VISIBLE_DEVICES"
    return result(f"memory of GPU {index}", not fix, note, fix)


def pytorch(num_gpus: int) -> Iterator[Line]:
    import torch

    count = torch.cuda.device_count()
    note = f"{torch.__version__} sees {count} of {num_gpus} GPUs"
    yield result("PyTorch", count == num_gpus, note, "install requirements.lock into a new .venv")
    pairs = list(combinations(range(count), 2))
    apart = [f"{i}-{j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    note = f"none between {', '.join(apart)}: slower" if apart else f"all {len(pairs)} pairs"
    yield result("peer access", True, note) if pairs else skipped("peer access", "not several GPUs")


def toolchain(asked: Asked) -> Iterator[Line]:
    problems = list(this_machine.toolchain_problems())
    for what, word in (("compiler", "compiler ("), ("Python headers", "Python.h")):
        problem = "".join(p for p in problems if word in p).removeprefix("this machine: ")
        note, _, fix = problem.rpartition(": ")
        if problem and asked.tiny:
            yield skipped(what, f"{note}; only a GPU needs it")
        else:
            yield result(what, not problem, note, fix)


def shared_memory(asked: Asked) -> Line:
    if not os.path.isdir(SHARED):
        return skipped(SHARED, "this system has none")
    size_gb = shutil.disk_usage(SHARED).total / 1e9
    good = size_gb >= MIN_SHARED_GB or asked.num_gpus < 2
    fix = "start the container with --ipc=host or --shm-size=16g"
    return result(SHARED, good, f"{size_gb:.3g} GB; several GPUs need {MIN_SHARED_GB:g}", fix)


def config_lines(asked: Asked) -> Iterator[Line]:
    """What this machine lacks for the given config, by its memory plan too."""
    if not asked.config:
        yield skipped("config", "none given; rl check-gpu configs/<name>.jsonnet")
        return
    words = [*asked.overrides]
    if asked.num_gpus:
        words += [f"gpu_gb={int(asked.gpu_gb)}", f"world_size={asked.num_gpus}"]
    host_gb = this_machine.host_memory_gb()
    try:
        config = load_config(asked.config, words)
        found = check_report.problems(config) or check_report.problems_here(
            config, Machine((asked.gpu_gb,) * asked.num_gpus), config.world_size, host_gb
        )
    except ConfigError as error:
        found = list(error.problems)
    for problem in found:
        note, _, fix = problem.partition("; ")
        yield result("config", False, note, fix or "rl check lists what is wrong")
    if not found:
        note = f"fits; host memory {host_gb or 0:.0f} GB"
        yield result("config", True, f"{note}; {this_machine.disk_line(build.resolve(config))}")
