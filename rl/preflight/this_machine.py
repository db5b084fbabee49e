"""Has this machine what a run on its GPUs needs beside memory? Asked offline, without torch."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rl import build
from rl.build import Plug, Resolved
from rl.preflight import footprint
from rl.preflight.disk import disk_problems
from rl.preflight.leaving import hub_models, is_offline
from rl.record.tracking import not_installed

CUDA, MIN_DRIVER, MIN_CAPABILITY = 13, 580, 7.5
"""Of the pinned PyTorch; the least NVIDIA driver and compute capability of its kernels."""
BUSY_GB = 1.0
"""More than a desktop takes of a GPU."""
SHARED, MIN_SHARED_GB = "/dev/shm", 1.0  # nosec B108
"""Where NCCL's ranks exchange data, and its size; Docker gives a container 0.064."""


def machine_problems(resolved: Resolved, starts: bool = False) -> list[str]:
    """What this machine lacks, and what its devices cannot compute. `starts`: the run starts here,
    so that without a GPU 'auto' is the CPU; --check may be about another machine."""
    here = driver() if wants_gpu(resolved) and _torch_build() != "cpu" else ""
    if not here:
        return _device_problems(resolved, "cpu" if starts else "", math.inf)
    capability = _capability()
    found = _device_problems(resolved, "cuda", capability)
    found += [*_driver_problems(here, capability), *_offline_problems(resolved)]
    found += [*_sharing_problems(resolved), *disk_problems(resolved)]
    return found + (_compiler_problems() if _builds_kernels(resolved) else [])


def _device_problems(resolved: Resolved, auto: str, capability: float) -> list[str]:
    """What plugs cannot compute where they are. `auto`: the kind of device that 'auto' is, '' where
    nobody knows; `capability`: the GPU's."""
    found = []
    plugs: list[Plug[Any]] = [resolved.policy, resolved.engine, *resolved.model_runners]
    for plug in plugs:
        device = _device(resolved, getattr(plug.config, "device", "auto"))
        if device := auto if device == "auto" else device:
            seen = None if device == "cpu" else capability
            problems, wrong = build.ask_plug(plug, "device_problems", resolved.policy.config, seen)
            found += [*(f"{plug.key}.{problem}" for problem in problems or ()), *wrong]
    return found


def _device(resolved: Resolved, stated: str) -> str:
    """Of a plug: 'auto', which an engine's is too, is where the policy is."""
    return footprint.policy_device(resolved) if stated == "auto" else stated


def machine_lines(resolved: Resolved) -> list[str]:
    """What this machine has, or what the one that trains has to have; and which trackers it lacks,
    without which a run goes on."""
    return [*_gpu_lines(resolved), *busy_lines(resolved), *not_installed(resolved.config.tracking)]


def busy_lines(resolved: Resolved) -> list[str]:
    """Of a forgotten job, whose memory the run would miss minutes after its start."""
    words = _of_each_gpu("memory.used") if wants_gpu(resolved) and driver() else []
    used_gb = [float(word) * 2**20 / 1e9 for word in words if word.isdecimal()]
    held = [f"{gb:.1f} GB of GPU {i}" for i, gb in enumerate(used_gb) if gb > BUSY_GB]
    where = "nvidia-smi names them; end them, or choose GPUs by CUDA_VISIBLE_DEVICES"
    return [f"other processes hold {', '.join(held)}: {where}"] if held else []


def _gpu_lines(resolved: Resolved) -> list[str]:
    if not wants_gpu(resolved):
        return ["the run uses no GPU"]
    needs = f"an NVIDIA driver >= {MIN_DRIVER} (CUDA {CUDA})"
    if _builds_kernels(resolved):
        needs += ", a C compiler and Python's headers (apt install build-essential python3-dev)"
    found = driver()
    if not found:
        wrong = _device_problems(resolved, "cuda", math.inf)
        return [
            f"no GPU to be seen; the machine that trains needs {needs}",
            *(f"on a GPU it would be refused: {problem}" for problem in wrong),
        ]
    if _torch_build() == "cpu":
        return [f"PyTorch is installed for a CPU, and runs on it; on the GPU it needs {needs}"]
    return [f"NVIDIA driver {found}; needed: {needs}"]


def driver() -> str:
    """Version of the NVIDIA driver; '' where no GPU is to be seen."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    return next(iter(_of_each_gpu("driver_version")), "")


def _capability() -> float:
    """The best compute capability among this machine's GPUs, as others may be hidden from the run;
    infinity where the tool does not tell."""
    words = _of_each_gpu("compute_cap")
    return max((float(word) for word in words if word[:1].isdecimal()), default=math.inf)


def _of_each_gpu(field: str) -> list[str]:
    """What nvidia-smi says; [] where there is none."""
    question = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(question, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []


def wants_gpu(resolved: Resolved) -> bool:
    """Whether any model may be on one."""
    return any(_device(resolved, claim.device) != "cpu" for claim in build.claims(resolved))


def _torch_build() -> str:
    """'cpu' or 'cu126', as the installed PyTorch is called; '' as the pinned one is, or none."""
    try:
        return version("torch").partition("+")[2]
    except PackageNotFoundError:
        return ""


def _builds_kernels(resolved: Resolved) -> bool:
    """An engine of its own has Triton's kernels; PyTorch's eager ones need no compiler."""
    return not resolved.engine.cls.samples_with_trainer


def _driver_problems(found: str, capability: float) -> list[str]:
    """Of a driver of that version and of such GPUs, for the pinned PyTorch."""
    if not _torch_build() and capability < MIN_CAPABILITY:
        return [
            f"this machine: its GPU has compute capability {capability}, and the pinned PyTorch "
            f"has no kernels below {MIN_CAPABILITY}; use another GPU, or set policy.device=cpu"
        ]
    major = found.partition(".")[0]
    is_old = major.isdecimal() and int(major) < MIN_DRIVER
    if not is_old or _torch_build() or _compatible_cuda() >= CUDA:
        return []
    return [
        f"this machine: NVIDIA driver {found} is too old for the pinned PyTorch, which is built "
        f"for CUDA {CUDA}; install driver {MIN_DRIVER} or newer"
    ]


def _sharing_problems(resolved: Resolved) -> list[str]:
    """Of ranks that exchange what they compute through shared memory."""
    several = resolved.config.world_size > 1 and os.path.isdir(SHARED)
    size_gb = shutil.disk_usage(SHARED).total / 1e9 if several else math.inf
    if size_gb >= MIN_SHARED_GB:
        return []
    return [
        f"this machine: {SHARED} has {size_gb:.3f} GB, and NCCL wants {MIN_SHARED_GB:g} GB for "
        "world_size > 1; start the container with --ipc=host or --shm-size=16g"
    ]


def _compiler_problems() -> list[str]:
    """As Triton looks for them."""
    stated = os.environ.get("CC")
    found = []
    if stated is not None and shutil.which(stated) is None:
        found.append(
            f"this machine: CC is {stated!r}, which is no program here, and Triton compiles a "
            "launcher for its kernels with it; export CC=gcc, or unset it"
        )
    elif stated is None and not (shutil.which("gcc") or shutil.which("clang")):
        found.append(
            "this machine: there is no C compiler (gcc, clang), and Triton compiles a launcher for "
            "its kernels: apt install build-essential, or export CC=<compiler>"
        )
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    if not header.is_file():
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        found.append(
            f"this machine: there is no {header}, and Triton compiles a launcher for its kernels "
            f"with it: apt install {python}-dev, or use a Python that brings its headers"
        )
    return found


def _compatible_cuda() -> int:
    """CUDA's number as the library says it that programs here load: one for forward compatibility
    is newer than the driver. 0 where there is none."""
    try:
        found = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
        return found.value // 1000
    except (OSError, AttributeError):
        return 0


def _offline_problems(resolved: Resolved) -> Iterable[str]:
    for key, path, is_cached in hub_models(resolved) if is_offline() else ():
        if not is_cached:
            yield (
                f"{key}: {path} is not in this machine's cache, and HF_HUB_OFFLINE forbids to "
                "fetch it; unset that, or fetch it elsewhere (hf download) and copy the cache"
            )
