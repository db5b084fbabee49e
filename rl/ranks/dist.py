"""A rank among the others: collectives, and which model is on which device."""

from __future__ import annotations

import math
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    import torch

# ---- dist ----------------------------------------------------------------------------------------
# This rank, and every collective the loop uses; imports torch only when needed.

T = TypeVar("T")

INIT_METHOD = "RL_INIT_METHOD"
"""Environment variable: `init_method` of `init_process_group`; unset: torchrun's variables."""
COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""The defaults (10 min NCCL, 30 min gloo) are shorter than one rank's wait for a slow judge."""


class PeerError(RuntimeError):
    """Another rank cannot go on, and sent this error in place of a value."""


@dataclass(frozen=True, eq=False)
class Dist:
    """This process's rank, device and collectives. Create it BEFORE any engine, which would
    otherwise create its own process group. With one process every collective is the identity.
    Either all ranks call a collective, or none."""

    rank: int = 0
    """0 .. world_size - 1 over all nodes."""
    world_size: int = 1
    local_rank: int = 0
    """Index on this node; picks the CUDA device."""
    device: str = "cpu"
    """'cpu' or 'cuda:<index>': the device of this rank's trainable policy."""
    _cpu_group: Any = None
    """gloo group for objects and CPU tensors; None with one process."""

    @classmethod
    def from_env(cls, device: str = "auto") -> Dist:
        """Read RANK, WORLD_SIZE and LOCAL_RANK, which the launcher sets as torchrun does, and join
        the group they describe.

        `device`: 'auto' (the local rank's CUDA device if there is any, else the CPU), 'cpu' or
        'cuda:<index>'. Raises ValueError when a variable is missing, or CUDA is asked for and
        absent.
        """
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size > 1 and (missing := {"RANK", "LOCAL_RANK"} - os.environ.keys()):
            raise ValueError(
                f"WORLD_SIZE={world_size} but {', '.join(sorted(missing))} is not set: start "
                "several ranks with `rl train --nproc N`, or unset WORLD_SIZE"
            )
        local_rank = int(os.environ["LOCAL_RANK"]) if world_size > 1 else 0
        device = _resolve_device(device, local_rank)
        if not device.startswith("cuda"):
            # transformers imports an installed DeepSpeed, which would warn about the CPU.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        else:
            import torch

            torch.cuda.set_device(device)
            torch.backends.cudnn.allow_tf32 = False  # matrix products use no TF32 either
        if world_size == 1:
            return cls(device=device)

        import torch.distributed as td

        rank = int(os.environ["RANK"])
        td.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            init_method=os.environ.get(INIT_METHOD, "env://"),
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        cpu_group = td.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        return cls(rank, world_size, local_rank, device, cpu_group)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place, any shape and dtype; all ranks get the same bits."""
        if self.world_size > 1:
            import torch.distributed as td

            td.all_reduce(tensor, group=None if tensor.is_cuda else self._cpu_group)
        return tensor

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """Elementwise float64 sum over ranks, exactly rounded, so independent of their order.
        Raises ValueError if the ranks disagree on the length."""
        rows = self.gather([float(value) for value in values])
        return [math.fsum(column) for column in zip(*rows, strict=True)]

    def max_int(self, value: int) -> int:
        return max(self.gather(int(value)))

    def any(self, flag: bool) -> bool:
        return bool(self.max_int(int(flag)))

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank; other ranks' arguments are ignored."""
        return self.gather(value if self.is_main else cast("T", None))[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank; values travel pickled. Raises
        `PeerError` when another rank reports that it cannot go on."""
        if self.world_size == 1:
            return [value]
        values = self._exchange(value)
        for rank, received in enumerate(values):
            if isinstance(received, PeerError):
                raise PeerError(f"rank {rank} cannot go on: {received}")
        return values

    def report_error(self, error: BaseException, timeout_s: float) -> bool:
        """Report that this rank cannot go on: other ranks raise `PeerError` in their next gather.
        Returns whether all received it within `timeout_s`. Other ranks need not call it."""
        if self.world_size == 1 or isinstance(error, PeerError):
            return True
        received = threading.Event()

        def send() -> None:
            with suppress(Exception):  # a rank is gone
                self._exchange(PeerError(repr(error)))
                received.set()

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        sender.join(timeout_s)
        return received.is_set()

    def _exchange(self, value: Any) -> list[Any]:
        import torch.distributed as td

        values: list[Any] = [None] * self.world_size
        td.all_gather_object(values, value, group=self._cpu_group)
        return values

    def reduce(self, metrics: Any) -> dict[str, float]:
        """Merge all ranks' `Metrics`, each metric over its global denominator."""
        return type(metrics).merge(self.gather(metrics.state()))

    def close(self) -> None:
        """Leave the process group; the last call of a run that succeeded."""
        if self.world_size > 1:
            import torch.distributed as td

            td.destroy_process_group()


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether ZeRO-3 shards it: each call then gathers weights, so all ranks must call it."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def calls_in_step(num_calls: int, module: torch.nn.Module) -> int:
    """Number of calls of the module: `num_calls`; if it is sharded, the largest of all ranks."""
    if not is_sharded(module):
        return num_calls
    import torch

    most = torch.tensor(num_calls, device=next(module.parameters()).device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)


def _resolve_device(device: str, local_rank: int) -> str:
    """'auto' | 'cpu' | 'cuda:<i>' -> 'cpu' | 'cuda:<i>'."""
    if device == "cpu":
        return device
    import torch

    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto" and num_devices == 0:
        return "cpu"
    index = local_rank if device == "auto" else int(device[5:])
    if index >= num_devices:
        raise ValueError(
            f"rank with LOCAL_RANK={local_rank} needs cuda:{index}, but this machine has "
            f"{num_devices} CUDA devices: start fewer ranks (--nproc), or use device 'cpu'"
        )
    return f"cuda:{index}"


# ---- placement -----------------------------------------------------------------------------------
# Checks and enforces each model's device and memory limit (GB: 1e9 bytes).


@dataclass(frozen=True)
class Claim:
    """The device and memory limit that the config section `key` sets for its model."""

    key: str
    device: str
    """As configured: 'auto' (the rank's own), 'cpu', 'cuda:1', or 'cuda:+1' (its number plus 1)."""
    max_memory_gb: float | None = None


@dataclass(frozen=True)
class Machine:
    cuda_gb: tuple[float, ...] = ()


def resolve_device(device: str, default: str) -> str:
    """The device onto which a plugin loads its model; `default`: the rank's ('cpu', 'cuda:<i>').
    Raises ValueError for 'cuda:+<n>' on a rank without a CUDA device."""
    if device == "auto":
        return default
    if not device.startswith("cuda:+"):
        return device
    if not default.startswith("cuda:"):
        raise ValueError(
            f"{device!r} is relative to the rank's own CUDA device, but the rank runs on "
            f"{default}; give 'auto', or the device itself"
        )
    return f"cuda:{int(default[5:]) + int(device[6:])}"


def problems(
    claims: Sequence[Claim], defaults: Sequence[str], machine: Machine | None
) -> list[str]:
    """All problems of the models' placement, each with its key and remedy. `defaults`: the ranks'
    devices on one machine; `machine`: None if its GPUs are unknown."""
    found = []
    for claim in claims:
        try:
            devices = [resolve_device(claim.device, default) for default in defaults]
            for device in sorted({*devices} - {"cpu"}):
                ranks = [str(r) for r, own in enumerate(defaults) if device in (devices[r], own)]
                _check_device(claim.device, device, ranks, len(defaults), machine)
        except ValueError as error:
            found.append(f"{claim.key}.device: {error}")
    return found or [*_wrong_limits(claims, defaults[0])]


def _check_device(
    stated: str, device: str, ranks: Sequence[str], num_ranks: int, machine: Machine | None
) -> None:
    """Raise ValueError if the machine lacks the device, or if several ranks would load models onto
    it, unaware of each other."""
    if machine is not None and int(device[5:]) >= (count := len(machine.cuda_gb)):
        raise ValueError(
            f"{stated!r} is {device} for one of the ranks; this machine has {count} CUDA devices; "
            "'auto' is each rank's own device, or the CPU"
        )
    if len(ranks) > 1:
        raise ValueError(
            f"{stated!r} puts models of ranks {', '.join(ranks)} on {device}; give 'auto' (each "
            f"rank's own device), or 'cuda:+{num_ranks}' (its number plus {num_ranks}: the devices "
            "after the ranks' own)"
        )


def _wrong_limits(claims: Sequence[Claim], default: str) -> Iterator[str]:
    """Limits that cannot be enforced: the allocator limits devices, not models."""
    for device, sharing in _by_device(claims, default).items():
        limited = [claim.key for claim in sharing if claim.max_memory_gb is not None]
        unlimited = [claim.key for claim in sharing if claim.max_memory_gb is None]
        if device != "cpu" and limited and unlimited:
            yield (
                f"{limited[0]}.max_memory_gb: {device} also holds {', '.join(unlimited)}, without "
                "a limit, so no limit can be enforced there; give all models there a limit, move "
                "one, or drop this key"
            )


def _by_device(claims: Sequence[Claim], default: str) -> dict[str, list[Claim]]:
    claims_on: dict[str, list[Claim]] = defaultdict(list)
    for claim in claims:
        claims_on[resolve_device(claim.device, default)].append(claim)
    return claims_on


def describe(claims: Sequence[Claim]) -> Iterator[str]:
    """One line per model, for `--check` and the console."""
    for claim in claims:
        device = "the rank's own device" if claim.device == "auto" else claim.device
        limit = "" if claim.max_memory_gb is None else f", at most {claim.max_memory_gb:g} GB"
        yield f"{claim.key:<20} {device}{limit}"


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
            torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
