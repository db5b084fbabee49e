"""Checks what this machine offers a run: GPUs, driver, compiler, memory, disk; without torch."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rl import build
from rl.build import Plugin, Resolved
from rl.check.fetch import hub_models, is_offline
from rl.checkpoints.checkpoint import find
from rl.memory import footprint
from rl.trackers.tracking import not_installed

CUDA, MIN_DRIVER, MIN_CAPABILITY = 13, 580, 7.5
"""CUDA of the pinned PyTorch; the oldest NVIDIA driver and compute capability for its kernels."""
BUSY_GB = 1.0
"""GPU memory in use above which another process is reported; a desktop takes less."""
SHARED, MIN_SHARED_GB = "/dev/shm", 1.0  # nosec B108
"""Where NCCL's ranks exchange data, and how much NCCL needs; Docker's default is 0.064 GB."""
STATE_BYTES = 12
"""Bytes per trained parameter in a checkpoint: float32 value and two optimizer moments."""


def machine_problems(resolved: Resolved, starts: bool = False) -> list[str]:
    """What this machine lacks, and what its devices cannot compute. `starts`: the run starts here,
    so that without a GPU 'auto' is the CPU; --check may be about another machine."""
    here = driver() if wants_gpu(resolved) and _torch_build() != "cpu" else ""
    if not here:
        return _device_problems(resolved, "cpu" if starts else "", math.inf)
    # The best of this machine's GPUs, as others may be hidden from the run.
    words = [word for word in _of_each_gpu("compute_cap") if word[:1].isdecimal()]
    capability = max(map(float, words), default=math.inf)
    return [
        *_device_problems(resolved, "cuda", capability),
        *driver_problems(here, capability),
        *_storage_problems(resolved),
        *([] if resolved.engine.cls.samples_with_trainer else toolchain_problems()),
    ]


def _device_problems(resolved: Resolved, auto: str, capability: float) -> list[str]:
    """What plugins cannot compute on their devices. `auto`: the device that 'auto' stands for, ''
    if unknown; `capability`: the GPU's compute capability."""
    found = []
    plugins: list[Plugin[Any]] = [resolved.policy, resolved.engine, *resolved.model_runners]
    for plugin in plugins:
        device = _device(resolved, getattr(plugin.config, "device", "auto"))
        if device := auto if device == "auto" else device:
            seen = None if device == "cpu" else capability
            problems, wrong = build.ask_plugin(
                plugin, "device_problems", resolved.policy.config, seen
            )
            found += [*(f"{plugin.key}.{problem}" for problem in problems or ()), *wrong]
    return found


def _device(resolved: Resolved, stated: str) -> str:
    """The stated device; 'auto', also for an engine without the key, means the policy's device."""
    return footprint.policy_device(resolved) if stated == "auto" else stated


def machine_lines(resolved: Resolved) -> list[str]:
    """What this machine has, or what the training machine needs; and tracker packages that are not
    installed (a run goes on without them)."""
    return [*_gpu_lines(resolved), *busy_lines(resolved), *not_installed(resolved.config.tracking)]


def busy_lines(resolved: Resolved) -> list[str]:
    """GPU memory that other processes hold: the run could run out of memory minutes later."""
    words = _of_each_gpu("memory.used") if wants_gpu(resolved) and driver() else []
    used_gb = [float(word) * 2**20 / 1e9 for word in words if word.isdecimal()]
    held = [f"{gb:.1f} GB of GPU {i}" for i, gb in enumerate(used_gb) if gb > BUSY_GB]
    where = "nvidia-smi names them; end them, or choose GPUs by CUDA_VISIBLE_DEVICES"
    return [f"other processes hold {', '.join(held)}: {where}"] if held else []


def _gpu_lines(resolved: Resolved) -> list[str]:
    if not wants_gpu(resolved):
        return ["the run uses no GPU"]
    needs = f"an NVIDIA driver >= {MIN_DRIVER} (CUDA {CUDA})"
    if not resolved.engine.cls.samples_with_trainer:
        needs += ", a C compiler and Python's headers (apt install build-essential python3-dev)"
    found = driver()
    if found and _torch_build() == "cpu":
        return [f"PyTorch is installed for a CPU, and runs on it; on the GPU it needs {needs}"]
    if found:
        return [f"NVIDIA driver {found}; needed: {needs}"]
    wrong = _device_problems(resolved, "cuda", math.inf)
    refused = [f"on a GPU it would be refused: {problem}" for problem in wrong]
    return [f"no GPU to be seen; the machine that trains needs {needs}", *refused]


def driver() -> str:
    """Version of the NVIDIA driver; '' where no GPU is to be seen."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    return next(iter(_of_each_gpu("driver_version")), "")


def _of_each_gpu(field: str) -> list[str]:
    """`field` of every GPU, from nvidia-smi; [] where nvidia-smi is missing or fails."""
    question = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(question, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []


def has_gpus() -> bool:
    """Whether this machine has NVIDIA GPUs, and so may be the one that trains."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*"))


def host_memory_gb(root: Path = Path("/")) -> float | None:
    """Memory of this machine, or the smallest limit of a control group (version 2) around us; None
    where that cannot be read."""

    def words(file: str) -> list[str]:
        with suppress(OSError):
            return (root / file).read_text().split()
        return []

    memory = words("proc/meminfo")
    if "MemTotal:" not in memory:
        return None
    found = [int(memory[memory.index("MemTotal:") + 1]) * 1024]
    for group in words("proc/self/cgroup"):
        # In a container's cgroup namespace our path is '/', and the limit is in the mount's root.
        inside = Path(group.removeprefix("0::/"))
        for folder in (inside, *inside.parents) if group.startswith("0::/") else ():
            limit = "".join(words(f"sys/fs/cgroup/{folder}/memory.max"))
            found += [int(limit)] if limit.isdigit() else []
    return min(found) / 1e9


def wants_gpu(resolved: Resolved) -> bool:
    """Whether any model may be on one."""
    return any(_device(resolved, claim.device) != "cpu" for claim in build.claims(resolved))


def _torch_build() -> str:
    """Local version of the installed PyTorch ('cpu', 'cu126'); '' for the pinned one, or none."""
    try:
        return version("torch").partition("+")[2]
    except PackageNotFoundError:
        return ""


def driver_problems(found: str, capability: float) -> Iterable[str]:
    """What keeps the pinned PyTorch, not one of the user's own, from running with these."""
    if _torch_build():
        return
    if capability < MIN_CAPABILITY:
        yield (
            f"this machine: its GPU has compute capability {capability}, and the pinned PyTorch "
            f"has no kernels below {MIN_CAPABILITY}; use another GPU, or set policy.device=cpu"
        )
    number = ctypes.c_int()
    with suppress(OSError, AttributeError):
        # NVIDIA's forward compatibility: a newer library makes up for an old driver.
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    major = found.partition(".")[0]
    if major.isdecimal() and int(major) < MIN_DRIVER and number.value // 1000 < CUDA:
        yield (
            f"this machine: NVIDIA driver {found} is too old for the pinned PyTorch, which is "
            f"built for CUDA {CUDA}; install driver {MIN_DRIVER} or newer"
        )


def toolchain_problems() -> Iterable[str]:
    """A missing compiler or missing Python headers, looked up as Triton does. Only an engine
    with kernels of its own (vLLM) needs them, for Triton; eager PyTorch compiles nothing."""
    stated = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([stated] if stated else ["gcc", "clang"])):
        yield (
            f"this machine: there is no C compiler ({stated or 'gcc, clang'}), and Triton compiles "
            "a launcher for its kernels: apt install build-essential, or export CC=<compiler>"
        )
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    if not header.is_file():
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        yield (
            f"this machine: there is no {header}, and Triton compiles a launcher for its kernels "
            f"with it: apt install {python}-dev, or use a Python that brings its headers"
        )


def _storage_problems(resolved: Resolved) -> Iterable[str]:
    """Models that are not cached while fetching is forbidden; too little shared memory for the
    ranks; too little disk space for the checkpoints."""
    for key, path, is_cached in hub_models(resolved) if is_offline() else ():
        if not is_cached:
            yield (
                f"{key}: {path} is not in this machine's cache, and HF_HUB_OFFLINE forbids to "
                "fetch it; unset that, or fetch it elsewhere (hf download) and copy the cache"
            )
    if resolved.config.world_size > 1 and os.path.isdir(SHARED):
        size_gb = shutil.disk_usage(SHARED).total / 1e9
        if size_gb < MIN_SHARED_GB:
            yield (
                f"this machine: {SHARED} has {size_gb:.3f} GB, and NCCL wants {MIN_SHARED_GB:g} GB "
                "for world_size > 1; start the container with --ipc=host or --shm-size=16g"
            )
    one_gb, number = checkpoints_gb(resolved)
    if one_gb is not None and number * one_gb > free_gb(Path(resolved.config.base_exp_dir)):
        yield f"base_exp_dir: too small a disk for {disk_line(resolved)}; name a larger one"


def disk_line(resolved: Resolved) -> str:
    """What the checkpoints need, and what is free."""
    folder = resolved.config.base_exp_dir
    one_gb, number = checkpoints_gb(resolved)
    need = "unknown, like the policy's size"
    if one_gb is not None:
        need = f"up to {number * one_gb:.3g} GB ({number} of {one_gb:.3g}), and pictures"
    return f"checkpoints: {need}; {free_gb(Path(folder)):.3g} GB are free at {folder} here"


def checkpoints_gb(resolved: Resolved) -> tuple[float | None, int]:
    """(GB of one checkpoint: model files, float32 values and moments; None where the policy's size
    is unknown), (number of checkpoints that still need space)."""
    config, sizes = resolved.config, footprint.sizes(resolved)
    # The newest two, one that is being written, and the best on held-out samples.
    number = 3 + bool(config.evaluation.every_n_iterations and config.data.validation)
    if find(config.run_dir, hashes=False).path is not None:
        number = 1
    if sizes is None:
        return None, number
    model_bytes = sizes.bytes_per_weight if sizes.lora_rank is None else 4
    return sizes.trained_params * (model_bytes + STATE_BYTES) / 1e9, number


def free_gb(folder: Path) -> float:
    """On the file system of `folder`, which need not exist yet."""
    places = (folder, *folder.absolute().parents)
    there = next(place for place in places if os.path.exists(place))
    return shutil.disk_usage(there).free / 1e9
