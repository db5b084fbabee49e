"""Has this machine what a run on its GPUs needs beside memory? Asked offline, without torch.

What: driver, the C compiler and the Python headers with which Triton builds a launcher at its first
kernel, models that the hub may not be asked for, room on the disk. What not: GPU memory
(`memory_remedies.py`). On a machine without a GPU nothing is wrong: what it lacks is said as what
the training machine needs.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rl import build
from rl.build import Resolved
from rl.preflight.disk import disk_problems
from rl.preflight.leaving import hub_models, is_offline
from rl.record.tracking import not_installed

CUDA, MIN_DRIVER = 13, 580
"""What the pinned PyTorch is built for, and the first NVIDIA driver that runs it."""


def machine_problems(resolved: Resolved) -> list[str]:
    """What this machine lacks; [] where it has no GPU, or the run uses none."""
    here = driver() if _wants_gpu(resolved) and _torch_build() != "cpu" else ""
    if not here:
        return []
    found = [*_driver_problems(here), *_offline_problems(resolved), *disk_problems(resolved)]
    return found + (_compiler_problems() if _builds_kernels(resolved) else [])


def machine_lines(resolved: Resolved) -> list[str]:
    """What this machine has, or what the one that trains has to have; and which trackers it lacks,
    without which a run goes on."""
    return [*_gpu_lines(resolved), *not_installed(resolved.config.tracking)]


def _gpu_lines(resolved: Resolved) -> list[str]:
    if not _wants_gpu(resolved):
        return ["the run uses no GPU"]
    needs = f"an NVIDIA driver >= {MIN_DRIVER} (CUDA {CUDA})"
    if _builds_kernels(resolved):
        needs += ", a C compiler and Python's headers (apt install build-essential python3-dev)"
    found = driver()
    if not found:
        return [f"no GPU to be seen; the machine that trains needs {needs}"]
    if _torch_build() == "cpu":
        return [f"PyTorch is installed for a CPU, and runs on it; on the GPU it needs {needs}"]
    return [f"NVIDIA driver {found}; needed: {needs}"]


def driver() -> str:
    """Version of the NVIDIA driver; '' where no GPU is to be seen."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    question = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(question, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    words = done.stdout.split()
    return words[0] if done.returncode == 0 and words else ""


def _wants_gpu(resolved: Resolved) -> bool:
    return any(claim.device != "cpu" for claim in build.claims(resolved))


def _torch_build() -> str:
    """'cpu' or 'cu126', as the installed PyTorch is called; '' as the pinned one is, or none."""
    try:
        return version("torch").partition("+")[2]
    except PackageNotFoundError:
        return ""


def _builds_kernels(resolved: Resolved) -> bool:
    """An engine of its own has Triton's kernels; PyTorch's eager ones need no compiler."""
    return not resolved.engine.cls.samples_with_trainer


def _driver_problems(found: str) -> list[str]:
    """Of a driver of that version, for the pinned PyTorch."""
    major = found.partition(".")[0]
    is_old = major.isdecimal() and int(major) < MIN_DRIVER
    if not is_old or _torch_build() or _compatible_cuda() >= CUDA:
        return []
    return [
        f"this machine: NVIDIA driver {found} is too old for the pinned PyTorch, which is built "
        f"for CUDA {CUDA}; install driver {MIN_DRIVER} or newer"
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
    if not is_offline():
        return
    for key, path, is_cached in hub_models(resolved):
        if not is_cached:
            yield (
                f"{key}: {path} is not in this machine's cache, and HF_HUB_OFFLINE forbids to "
                "fetch it; unset that, or fetch it elsewhere (hf download) and copy the cache"
            )
