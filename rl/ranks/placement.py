"""Which model is on which device, and how much memory (GB: 1e9 bytes) each may take there."""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.api.plugin import PlacedConfig

WORDS = "'auto' (the rank's own), 'cpu', 'cuda:1', or 'cuda:+1' (the rank's own number plus 1)"
_FORM = re.compile(r"auto|cpu|cuda:\+?\d+")


@dataclass(frozen=True)
class Claim:
    key: str
    device: str
    """As stated there; one of `WORDS`."""
    max_memory_gb: float | None = None


@dataclass(frozen=True)
class Machine:
    cuda_gb: tuple[float, ...] = ()


def claims_of(sections: Iterable[tuple[str, Any]]) -> list[Claim]:
    """The claims of (key, plugin config) pairs; other configs than `PlacedConfig` run no model."""
    return [
        Claim(key, config.device, config.max_memory_gb)
        for key, config in sections
        if isinstance(config, PlacedConfig)
    ]


def resolve_device(asked: str, own: str) -> str:
    """The device a plugin loads onto; `own`: the rank's ('cpu', 'cuda:<index>'). Raises ValueError
    for 'cuda:+<n>' on a rank without a CUDA device."""
    if asked == "auto":
        return own
    if not asked.startswith("cuda:+"):
        return asked
    if not own.startswith("cuda:"):
        raise ValueError(f"device {asked!r} counts from the rank's own CUDA device, which is {own}")
    return f"cuda:{int(own[5:]) + int(asked[6:])}"


def problems(claims: Sequence[Claim], owns: Sequence[str], machine: Machine | None) -> list[str]:
    """Everything wrong with the placement of models, each with its key and remedy. `owns`: each
    rank's own device, for the ranks of one machine; `machine`: None if its GPUs are unknown."""
    if unknown := [claim for claim in claims if not _FORM.fullmatch(claim.device)]:
        return [f"{c.key}.device: {c.device!r} is no device; give {WORDS}" for c in unknown]
    cpu = [own for own in owns if not own.startswith("cuda:")]
    if cpu and (relative := [claim for claim in claims if "+" in claim.device]):
        return [
            f"{claim.key}.device: {claim.device!r} counts from the rank's own CUDA device, which "
            f"is {cpu[0]}; give 'auto', or the device itself"
            for claim in relative
        ]
    if machine is not None and (missing := [*_missing(claims, owns, machine)]):
        return missing
    return [*_shared(claims, owns), *_unlimited(claims, owns[0], machine)]


def _missing(claims: Sequence[Claim], owns: Sequence[str], machine: Machine) -> Iterator[str]:
    count = len(machine.cuda_gb)
    there = f"'cuda:0' to 'cuda:{count - 1}'" if count else "'cpu'"
    for claim in claims:
        for device in dict.fromkeys(resolve_device(claim.device, own) for own in owns):
            if device.startswith("cuda:") and int(device[5:]) >= count:
                given = f"{claim.key}.device: {claim.device!r} given"
                if claim.device not in (device, "auto"):
                    given += f", which is {device} for one of the ranks"
                yield f"{given}, this machine shows {count} CUDA devices; give 'auto' or {there}"


def _shared(claims: Sequence[Claim], owns: Sequence[str]) -> Iterator[str]:
    """Two ranks on one CUDA device: each would load its own copy there, unseen by the other."""
    for claim in claims:
        places = [resolve_device(claim.device, own) for own in owns]
        for device in dict.fromkeys(places):
            ranks = [str(r) for r, own in enumerate(owns) if device in (places[r], own)]
            if device.startswith("cuda:") and len(ranks) > 1:
                yield (
                    f"{claim.key}.device: {claim.device!r} puts models of ranks "
                    f"{', '.join(ranks)} on {device}; give 'auto' (each rank's own device), or "
                    f"'cuda:+{len(owns)}' (its number plus {len(owns)}: the devices behind the "
                    "ranks' own)"
                )
                break


def _unlimited(claims: Sequence[Claim], own: str, machine: Machine | None) -> Iterator[str]:
    """Limits that cannot be kept: the allocator knows devices, not models."""
    for device, sharing in _by_device(claims, own).items():
        limited = [claim for claim in sharing if claim.max_memory_gb is not None]
        free = [claim.key for claim in sharing if claim.max_memory_gb is None]
        if device == "cpu" or not limited:
            continue
        key = f"{limited[0].key}.max_memory_gb"
        total = sum(claim.max_memory_gb or 0 for claim in sharing)
        size = math.inf if machine is None else machine.cuda_gb[int(device[5:])]
        if free:
            yield (
                f"{key}: {device} also holds {', '.join(free)}, without a limit, so no limit can "
                "be enforced there; give all models there a limit, move one, or drop this key"
            )
        elif total > size:
            yield f"{key}: {total:g} GB on {device} (all models there), which has {size:g}"


def _by_device(claims: Sequence[Claim], own: str) -> dict[str, list[Claim]]:
    places: dict[str, list[Claim]] = defaultdict(list)
    for claim in claims:
        places[resolve_device(claim.device, own)].append(claim)
    return places


def describe(claims: Sequence[Claim]) -> list[str]:
    """One line per model, for `--check` and the console."""
    lines = []
    for claim in claims:
        place = "the rank's own device" if claim.device == "auto" else claim.device
        limit = "" if claim.max_memory_gb is None else f", at most {claim.max_memory_gb:g} GB"
        lines.append(f"{claim.key:<20} {place}{limit}")
    return lines


def look_at_machine() -> Machine:
    import torch

    sizes = [
        torch.cuda.get_device_properties(index).total_memory / 1e9
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    return Machine(tuple(sizes))


def own_devices(own: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The own devices of all ranks of this machine, from this rank's and torchrun's variables."""
    num_ranks = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_ranks == 1 or not own.startswith("cuda:"):
        return [own] * num_ranks
    return [f"cuda:{rank}" for rank in range(num_ranks)]


def enforce(claims: Sequence[Claim], own: str) -> None:
    """Refuse what cannot be placed here (ValueError with every problem), then set the memory
    limits, before any model is loaded. A model beyond its limit gets `torch.OutOfMemoryError`."""
    machine = look_at_machine()
    found = problems(claims, own_devices(own), machine)
    if found:
        raise ValueError("\n".join(found))
    for device, sharing in _by_device(claims, own).items():
        limits_gb = [claim.max_memory_gb for claim in sharing if claim.max_memory_gb is not None]
        if device != "cpu" and len(limits_gb) == len(sharing):
            import torch

            share = sum(limits_gb) / machine.cuda_gb[int(device[5:])]
            torch.cuda.set_per_process_memory_fraction(share, device)
