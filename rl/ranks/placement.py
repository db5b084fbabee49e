"""Checks and enforces each model's device and memory limit (GB: 1e9 bytes)."""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.api.plugin import PlacedConfig

DEVICES = "'auto' (the rank's own), 'cpu', 'cuda:1', or 'cuda:+1' (the rank's own number plus 1)"
_FORM = re.compile(r"auto|cpu|cuda:\+?\d+")


@dataclass(frozen=True)
class Claim:
    """The device and memory limit that the config section `key` sets for its model."""

    key: str
    device: str
    """As configured; one of `DEVICES`."""
    max_memory_gb: float | None = None


@dataclass(frozen=True)
class Machine:
    cuda_gb: tuple[float, ...] = ()


def claims_of(sections: Iterable[tuple[str, Any]]) -> list[Claim]:
    """The claims of (key, plugin config) pairs; only a `PlacedConfig` runs a model."""
    return [
        Claim(key, config.device, config.max_memory_gb)
        for key, config in sections
        if isinstance(config, PlacedConfig)
    ]


def resolve_device(device: str, default: str) -> str:
    """The device onto which a plugin loads its model; `default`: the rank's ('cpu', 'cuda:<i>').
    Raises ValueError for 'cuda:+<n>' on a rank without a CUDA device."""
    if device == "auto":
        return default
    if not device.startswith("cuda:+"):
        return device
    if not default.startswith("cuda:"):
        raise ValueError(
            f"device {device!r} is relative to the rank's CUDA device, but it runs on {default}"
        )
    return f"cuda:{int(default[5:]) + int(device[6:])}"


def problems(
    claims: Sequence[Claim], defaults: Sequence[str], machine: Machine | None
) -> list[str]:
    """All problems of the models' placement, each with its key and remedy. `defaults`: the ranks'
    devices on one machine; `machine`: None if its GPUs are unknown."""
    if unknown := [claim for claim in claims if not _FORM.fullmatch(claim.device)]:
        return [f"{c.key}.device: {c.device!r} is not a device; give {DEVICES}" for c in unknown]
    cpu = [default for default in defaults if not default.startswith("cuda:")]
    if cpu and (relative := [claim for claim in claims if "+" in claim.device]):
        return [
            f"{claim.key}.device: {claim.device!r} is relative to the rank's own CUDA device, "
            f"but the rank runs on {cpu[0]}; give 'auto', or the device itself"
            for claim in relative
        ]
    if machine is not None and (missing := [*_missing(claims, defaults, machine)]):
        return missing
    return [*_shared(claims, defaults), *_unlimited(claims, defaults[0], machine)]


def _missing(claims: Sequence[Claim], defaults: Sequence[str], machine: Machine) -> Iterator[str]:
    count = len(machine.cuda_gb)
    devices = f"'cuda:0' to 'cuda:{count - 1}'" if count else "'cpu'"
    for claim in claims:
        for device in dict.fromkeys(resolve_device(claim.device, each) for each in defaults):
            if device.startswith("cuda:") and int(device[5:]) >= count:
                stated = f"{claim.key}.device: {claim.device!r} given"
                if claim.device not in (device, "auto"):
                    stated += f", which is {device} for one of the ranks"
                yield f"{stated}; this machine has {count} CUDA devices: give 'auto' or {devices}"


def _shared(claims: Sequence[Claim], defaults: Sequence[str]) -> Iterator[str]:
    """Problems: two ranks would load models onto one CUDA device, unaware of each other."""
    for claim in claims:
        devices = [resolve_device(claim.device, default) for default in defaults]
        for device in dict.fromkeys(devices):
            ranks = [str(r) for r, each in enumerate(defaults) if device in (devices[r], each)]
            if device.startswith("cuda:") and len(ranks) > 1:
                yield (
                    f"{claim.key}.device: {claim.device!r} puts models of ranks "
                    f"{', '.join(ranks)} on {device}; give 'auto' (each rank's own device), or "
                    f"'cuda:+{len(defaults)}' (its number plus {len(defaults)}: the devices after "
                    "the ranks' own)"
                )
                break


def _unlimited(claims: Sequence[Claim], default: str, machine: Machine | None) -> Iterator[str]:
    """Limits that cannot be enforced: the allocator limits devices, not models."""
    for device, sharing in _by_device(claims, default).items():
        limited = [claim for claim in sharing if claim.max_memory_gb is not None]
        unlimited = [claim.key for claim in sharing if claim.max_memory_gb is None]
        if device == "cpu" or not limited:
            continue
        key = f"{limited[0].key}.max_memory_gb"
        total = sum(claim.max_memory_gb or 0 for claim in sharing)
        size = math.inf if machine is None else machine.cuda_gb[int(device[5:])]
        if unlimited:
            yield (
                f"{key}: {device} also holds {', '.join(unlimited)}, without a limit, so no limit "
                "can be enforced there; give all models there a limit, move one, or drop this key"
            )
        elif total > size:
            yield f"{key}: all limits on {device} add up to {total:g} GB; it has {size:g} GB"


def _by_device(claims: Sequence[Claim], default: str) -> dict[str, list[Claim]]:
    claims_on: dict[str, list[Claim]] = defaultdict(list)
    for claim in claims:
        claims_on[resolve_device(claim.device, default)].append(claim)
    return claims_on


def describe(claims: Sequence[Claim]) -> list[str]:
    """One line per model, for `--check` and the console."""
    lines = []
    for claim in claims:
        device = "the rank's own device" if claim.device == "auto" else claim.device
        limit = "" if claim.max_memory_gb is None else f", at most {claim.max_memory_gb:g} GB"
        lines.append(f"{claim.key:<20} {device}{limit}")
    return lines


def look_at_machine() -> Machine:
    import torch

    sizes = [
        torch.cuda.get_device_properties(index).total_memory / 1e9
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    return Machine(tuple(sizes))


def local_rank_devices(default: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The devices of all ranks of this machine, from this rank's and torchrun's variables."""
    num_ranks = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_ranks == 1 or not default.startswith("cuda:"):
        return [default] * num_ranks
    return [f"cuda:{rank}" for rank in range(num_ranks)]


def enforce(claims: Sequence[Claim], default: str) -> None:
    """Raise ValueError with every placement problem, or set the memory limits. Call it before any
    model is loaded. A model beyond its limit gets `torch.OutOfMemoryError`."""
    machine = look_at_machine()
    errors = problems(claims, local_rank_devices(default), machine)
    if errors:
        raise ValueError("\n".join(errors))
    for device, sharing in _by_device(claims, default).items():
        limits_gb = [claim.max_memory_gb for claim in sharing if claim.max_memory_gb is not None]
        if device != "cpu" and len(limits_gb) == len(sharing):
            import torch

            share = sum(limits_gb) / machine.cuda_gb[int(device[5:])]
            torch.cuda.set_per_process_memory_fraction(share, device)
