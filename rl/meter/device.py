"""Measures the rate of this device's matrix products and a process's peak memory."""

from __future__ import annotations

import resource
import time
from functools import cache

_MATMUL_SIDES = (256, 512, 1024, 2048, 4096, 8192)
_LONG_ENOUGH_S = 0.01
"""A product that takes this long shows the device's rate; smaller ones show the call's cost."""
_NUM_TIMED = 5


@cache
def measure_flops_per_s(device: str, dtype: str) -> float:
    """Operations per second of a large matrix product in `dtype` ('bfloat16', ...), a multiply-add
    counted as two: takes a fifth of a second, once a process.

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


def take_peak_memory_gb(device: str) -> float:
    """Most memory this process held, GB (1e9 bytes): on a CUDA device what torch allocated since
    the last call, elsewhere what was in main memory since the process began."""
    if device.startswith("cuda"):
        import torch

        peak_gb = torch.cuda.max_memory_allocated(device) / 1e9
        torch.cuda.reset_peak_memory_stats(device)
        return peak_gb
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
