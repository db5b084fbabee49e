"""Measures time and peak memory on a device, and how fast it multiplies matrices."""

from __future__ import annotations

import resource
import time
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MATMUL_SIDES = (256, 512, 1024, 2048, 4096, 8192)
_LONG_ENOUGH_S = 0.01
"""A product that takes this long measures the device's rate; a shorter one, the call's overhead."""
_NUM_TIMED = 5


@cache
def measure_flops_per_s(device: str, dtype: str) -> float:
    """Operations per second of a large matrix product in `dtype` ('bfloat16', ...); a multiply-add
    counts as two. Takes 0.2 s, once per process.

    Raises torch.OutOfMemoryError on a full device, so call it before models are loaded.
    """
    import torch

    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    # Random numbers, since zeros multiply faster on a GPU; the run's own generator is not touched.
    generator = torch.Generator(device).manual_seed(0)
    for side in _MATMUL_SIDES:
        matrix = torch.randn(side, side, device=device, generator=generator)
        matrix = matrix.to(getattr(torch, dtype))
        torch.mm(matrix, matrix)
        seconds = []
        for _ in range(_NUM_TIMED):
            synchronize()
            start_s = time.perf_counter()
            torch.mm(matrix, matrix)
            synchronize()
            seconds.append(time.perf_counter() - start_s)
        if min(seconds) > _LONG_ENOUGH_S:
            break
    if device.startswith("cuda"):
        del matrix
        torch.cuda.empty_cache()
    return 2 * side**3 / min(seconds)


def time_mark(device: str) -> float | torch.cuda.Event:
    """A moment: on a CUDA device that in which it finishes the work that is queued on the current
    stream by now, elsewhere this one, in seconds. Waits for nothing."""
    if not device.startswith("cuda"):
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def has_passed(mark: float | torch.cuda.Event) -> bool:
    """Whether the device has reached the mark."""
    return isinstance(mark, float) or mark.query()


def seconds_between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Seconds from one mark to a later one of the same device; waits until `end` has passed."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float), "marks of different devices"
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def take_peak_memory_gb(device: str) -> float:
    """Peak memory of this process, GB (1e9 bytes): on a CUDA device torch's allocations since the
    last call, elsewhere the resident main memory since the process started."""
    if device.startswith("cuda"):
        import torch

        peak_gb = torch.cuda.max_memory_allocated(device) / 1e9
        torch.cuda.reset_peak_memory_stats(device)
        return peak_gb
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
