"""What the cases of `rl bench-gpu` share: timing, and a line for each measurement."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl.meter import measure_flops_per_s, take_peak_memory_gb
from rl.ranks.dist import Dist
from rl.tools.gpu_checks import Line, Setup, measured

if TYPE_CHECKING:
    from benchmarks.gpu_models import Size

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """The result of timing one call."""

    ms: float
    """Median over the rounds."""
    num_rounds: int
    peak_gb: float
    """Peak memory of torch in a round, weights included; on a CPU, the process's peak so far."""


@dataclass
class Bench:
    """The settings of a case."""

    setup: Setup
    size: Size
    dist: Dist

    @property
    def folder(self) -> Path:
        """A temporary folder for tokenizer, image processor, configs and runs."""
        return Path(self.setup.folder)

    @property
    def device(self) -> str:
        """'cuda:0' or 'cpu'."""
        return self.dist.device

    @property
    def dtype(self) -> str:
        """dtype of all weights."""
        return self.setup.dtype

    def time(self, calls: Mapping[str, Call], seconds: float) -> dict[str, Timing]:
        """Runs each call once to warm up, then all calls in turn, in one or more rounds, until
        `seconds` have passed (at tiny size: one round)."""
        for call in calls.values():
            call()
        times_s: dict[str, list[float]] = {name: [] for name in calls}
        peaks_gb = dict.fromkeys(calls, 0.0)
        end_s = time.perf_counter() + (0.0 if self.setup.tiny else seconds)
        while True:
            for name, call in calls.items():
                take_peak_memory_gb(self.device)
                times_s[name].append(self.timed_s(call))
                peaks_gb[name] = max(peaks_gb[name], take_peak_memory_gb(self.device))
            if time.perf_counter() >= end_s:
                break
        return {
            name: Timing(1e3 * statistics.median(taken), len(taken), peaks_gb[name])
            for name, taken in times_s.items()
        }

    def timed_s(self, call: Call) -> float:
        """Wall seconds of the call; waits for the device before and after it."""
        self.wait()
        start_s = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - start_s

    def wait(self) -> None:
        """Until the device has run all launched kernels."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Frees unreachable objects and torch's cached memory."""
        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def line(
        self, what: str, timing: Timing, min_flops: float | None = None, peer: Timing | None = None
    ) -> Line:
        """A timing as a line. The floor is the time of `min_flops`, the fewest FLOPs of the call,
        at the rate of large matrix products on this device, which a process measures once.
        `peer`: timing of diffusers or TRL on the same work."""
        data = {"ms": timing.ms, "rounds": timing.num_rounds, "peak_gb": timing.peak_gb}
        note = f"{timing.ms:.4g} ms, median of {timing.num_rounds}"
        if min_flops is not None:
            data["floor_ms"] = 1e3 * min_flops / measure_flops_per_s(self.device, self.dtype)
            data["floor_share"] = data["floor_ms"] / timing.ms
            note += f"; floor {data['floor_ms']:.4g} ms ({data['floor_share']:.0%})"
        if peer is not None:
            data["peer_ratio"] = peer.ms / timing.ms
            note += f"; {data['peer_ratio']:.2f} times as fast"
        return measured(what, f"{note}; {timing.peak_gb:.1f} GB", **data)
