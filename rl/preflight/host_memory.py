"""How much host memory a run will want on one node, from sizes alone, and how much there is.

Over a container's limit the kernel ends a process without a word; hence the plan. Pages of files,
which the kernel takes back, are not in it. GB is 1e9 bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl.preflight.memory_plan import AWAKE, PHASES, Plan, Row, Sizes, trained_params

HOST_PHASES = ("start", "run", "save")
"""Models come to the GPU; iterations; a checkpoint is gathered while the engine sleeps."""
PROCESS_GB = 4.0
"""Python, torch, vLLM and CUDA of one rank; assumed."""
HELD_STATE_GB = 4.0
"""Of weights and moments, up to which every rank keeps a copy of the last finished iteration's (1.0
for rank 32 on a 7B), and a second one while the next is made; the first rank a third one, of the
checkpoint that is being written."""
UNROUNDED = "pinned_max_cached_size_mb"
"""torch's setting above which it rounds no pinned memory, and keeps none for later."""


@dataclass(frozen=True)
class HostPlan:
    """The parts of one node's host memory."""

    rows: Sequence[Row]
    """Of all its ranks together."""

    def total_gb(self, phase: str) -> float:
        """Sum of what is there in that phase."""
        return sum(row.gb for row in self.rows if phase in row.phases)

    @property
    def peak_gb(self) -> float:
        """The largest of the phases."""
        return max(self.total_gb(phase) for phase in HOST_PHASES)


def plan(
    sizes: Sizes,
    on_gpu: Plan,
    gpu_gb: float,
    num_ranks: int,
    environ: Mapping[str, str] = os.environ,
) -> HostPlan:
    """Host memory of one node with `num_ranks` ranks, the first of the run among them."""
    weights_gb = sizes.model.params * sizes.bytes_per_weight / 1e9
    after_start = ("run", "save")
    rows = [Row("processes", num_ranks * PROCESS_GB, HOST_PHASES)]
    engine = on_gpu.inference
    if on_gpu.engine is not None and engine is not None and on_gpu.engine.phases != PHASES:
        asleep_gb = engine.asleep_gb if _rounds(environ) else engine.weights_gb
        rows.append(Row("engine asleep, pinned", num_ranks * asleep_gb, after_start))
    if sizes.lora_rank is None and sizes.zero_stage in (1, 2):
        # DeepSpeed makes one flat tensor of all weights, on the host where the GPU lacks room.
        state_gb = sum(row.gb for row in on_gpu.rows if row.part == "optimiser state")
        if gpu_gb - (on_gpu.total_gb(AWAKE) - state_gb) < weights_gb:
            rows.append(Row("ZeRO's flat weights", num_ranks * 2 * weights_gb, ("start",)))
    if sizes.reads_reference:
        rows.append(Row("reference weights", num_ranks * weights_gb, after_start))
    rows += [
        Row(f"{model.name}, not on the GPU", model.host_gb(num_ranks), HOST_PHASES)
        for model in sizes.frozen
        if model.host_gb(num_ranks)
    ]
    gathered_gb = trained_params(sizes) * 12 / 1e9
    if gathered_gb <= HELD_STATE_GB:
        held_gb = (num_ranks * 2 + 1) * gathered_gb
        rows.append(Row("last finished iteration", held_gb, after_start))
    else:
        rows.append(Row("checkpoint: weights, moments", gathered_gb, ("save",)))
    return HostPlan(rows)


def host_problems(planned: HostPlan, num_ranks: int, here_gb: float | None) -> list[str]:
    """Why it does not fit a machine of that size; [] where it does, or nobody knows the size."""
    if here_gb is None or planned.peak_gb <= here_gb:
        return []
    phase = max(HOST_PHASES, key=planned.total_gb)
    parts = sorted((row for row in planned.rows if phase in row.phases), key=lambda row: -row.gb)
    named = ", ".join(f"{row.part} {row.gb:.1f}" for row in parts)
    remedy = "take fewer ranks on it, or a machine with more"
    if any(row.part.startswith("engine") for row in parts):
        remedy += (
            f"; PYTORCH_ALLOC_CONF={UNROUNDED}:1 keeps torch from rounding what is pinned up to "
            "powers of two (and pins it anew at every sleep), engine.residency=resident pins "
            "nothing, where the GPU has room"
        )
    return [
        f"host memory: {planned.peak_gb:.1f} GB in phase {phase!r} of {num_ranks} ranks on a "
        f"machine, or in a container, of {here_gb:.1f} ({named}); {remedy}"
    ]


def here_gb(root: Path = Path("/")) -> float | None:
    """Memory of this machine, or the least that a control group around us may take; None where
    that cannot be read."""
    try:
        lines = (root / "proc/meminfo").read_text().split("\n")
        total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    except (OSError, StopIteration, ValueError):
        return None
    return min([total, *_group_limits(root)]) / 1e9


def has_gpus() -> bool:
    """Whether this may be where training will run."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*"))


def _group_limits(root: Path) -> Iterable[int]:
    """Bytes; of both versions of control groups, from our own group upwards. In a container's own
    name space our path is '/', and the limit stands at the mount itself."""
    try:
        groups = (root / "proc/self/cgroup").read_text().split("\n")
    except OSError:
        return
    mounts = {"": ("sys/fs/cgroup", "memory.max")}
    mounts["memory"] = ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
    for group in filter(None, groups):
        _, controllers, path = group.split(":", 2)
        controller = "memory" if "memory" in controllers.split(",") else controllers
        if controller not in mounts:
            continue
        mount, name = mounts[controller]
        inside = Path(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            file = root / mount / folder / name
            if file.is_file() and (word := file.read_text().strip()).isdigit():
                yield int(word)


def _rounds(environ: Mapping[str, str]) -> bool:
    settings = environ.get("PYTORCH_ALLOC_CONF", "") + environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return UNROUNDED not in settings
