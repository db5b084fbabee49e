"""What was computed, and what this device could at best have done in the time.

A counter of operations and bytes that only grows, read like a clock (`done`); the device's measured
ceilings, hence its roofline; peak memory. Importing this needs no torch.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import torch

_MATMUL_SIDES = (256, 512, 1024, 2048, 4096, 8192)
_LONG_ENOUGH_S = 0.01
"""A product that takes this long shows the device's rate; smaller ones show the call's cost."""
_NUM_TIMED = 5
_COPIED_BYTES = {"cuda": 2**29, "cpu": 2**26}
"""Far beyond any cache."""


@dataclass(frozen=True)
class Work:
    """What a computation costs."""

    flops: float = 0.0
    """Operations of matrix products and convolutions; a multiply-add is two."""
    bytes_moved: float = 0.0
    """Between memory and the device, where that may be what limits: weights, mostly."""

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes_moved + other.bytes_moved)

    def __sub__(self, other: Work) -> Work:
        return Work(self.flops - other.flops, self.bytes_moved - other.bytes_moved)


@dataclass(frozen=True)
class Ceilings:
    """The best that one device was seen to do."""

    flops_per_s: float
    bytes_per_s: float

    def roofline_s(self, cost: Work) -> float:
        """Seconds below which this device cannot do it, computing and moving at the same time
        (Williams et al. 2009)."""
        return max(cost.flops / self.flops_per_s, cost.bytes_moved / self.bytes_per_s)


_done = Work()
_lock = threading.Lock()
_counting = threading.Lock()
_counted: WeakKeyDictionary[torch.nn.Module, dict[tuple[Hashable, ...], Work]]
_counted = WeakKeyDictionary()


def add(cost: Work) -> None:
    global _done
    with _lock:
        _done += cost


def done() -> Work:
    """Everything counted in this process so far."""
    return _done


def add_passes(output: torch.Tensor, forward: Work, backward: Work) -> None:
    """Count the forward that gave `output`, and its backward if a gradient ever arrives there."""
    add(forward)
    if output.requires_grad:
        output.register_hook(lambda gradient: add(backward))


@contextmanager
def counted(model: torch.nn.Module, *sizes: Hashable) -> Iterator[None]:
    """Count a frozen model's forward inside, its weights read once.

    The first forward of each `sizes` is counted operation by operation and remembered; later ones
    cost microseconds. One that raises counts nothing.

    Args:
        model: whose forward it is; what is remembered goes with it.
        sizes: all that the cost depends on, e.g. the shape of the input.
    """
    known = _counted.setdefault(model, {})
    if sizes in known:
        yield
    else:
        import torch

        from rl.meter.flop_count import FlopCount

        # Compiled code that meets a mode is never compiled again; and the stance is the process's,
        # so that two threads (a renderer, CLIP) must not set it at a time.
        with _counting, torch.compiler.set_stance("force_eager"), FlopCount() as count:
            yield
        known[sizes] = Work(count.flops, _weight_bytes(model))
    add(known[sizes])


def _weight_bytes(model: torch.nn.Module) -> int:
    """Whole, whatever part of them this rank holds."""
    return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in model.parameters())


@cache
def measure_ceilings(device: str, dtype: str) -> Ceilings:
    """The rate of a matrix product in `dtype` ('bfloat16', ...) and of a copy, bytes read plus
    written: a fifth of a second, once a process.

    Raises torch.OutOfMemoryError on a full device: ask before the models are loaded.
    """
    import torch

    # Random numbers, since zeros multiply faster on a GPU; the run's own generator is not touched.
    generator = torch.Generator(device).manual_seed(0)
    for side in _MATMUL_SIDES:
        matrix = torch.randn(side, side, device=device, generator=generator)
        matrix = matrix.to(getattr(torch, dtype))
        product = partial(torch.mm, matrix, matrix)
        if _best_s(device, product, 1) > _LONG_ENOUGH_S:
            break
    num_bytes = _COPIED_BYTES.get(torch.device(device).type, _COPIED_BYTES["cpu"])
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    copy = partial(torch.ones_like(source).copy_, source)
    ceilings = Ceilings(
        2 * side**3 / _best_s(device, product, _NUM_TIMED),
        2 * num_bytes / _best_s(device, copy, _NUM_TIMED),
    )
    if device.startswith("cuda"):
        del matrix, product, source, copy
        torch.cuda.empty_cache()
    return ceilings


def _best_s(device: str, call: Callable[[], object], num_timed: int) -> float:
    """Shortest of `num_timed` calls, behind one that warms up."""
    import torch

    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    call()
    seconds = []
    for _ in range(num_timed):
        synchronize()
        start_s = time.perf_counter()
        call()
        synchronize()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)


def take_peak_memory_gb(device: str) -> float:
    """Most memory this process held, GB (1e9 bytes): on a CUDA device what torch allocated since
    the last call, elsewhere what lay in main memory since the process began."""
    if device.startswith("cuda"):
        import torch

        peak_gb = torch.cuda.max_memory_allocated(device) / 1e9
        torch.cuda.reset_peak_memory_stats(device)
        return peak_gb
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
