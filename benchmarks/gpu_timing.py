"""What the measurements of `rl bench-gpu` share: timing, the table of results, the goals."""

from __future__ import annotations

import gc
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.report import table
from rl.meter.device import measure_flops_per_s, take_peak_memory_gb
from rl.ranks.dist import Dist

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


@dataclass(frozen=True)
class Line:
    """One row of the table of results."""

    item: str
    """The measurement, as `--items` names it."""
    what: str
    ms: float | None = None
    floor_ms: float | None = None
    """Time of the same FLOPs at the rate of large matrix products on this device."""
    peer_ratio: float | None = None
    """Time of diffusers' or TRL's implementation, divided by `ms`."""
    peak_gb: float | None = None
    note: str = ""

    @property
    def floor_share(self) -> float | None:
        """Share of the rate of matrix products that was reached."""
        return None if self.ms is None or self.floor_ms is None else self.floor_ms / self.ms


@dataclass(frozen=True)
class Goal:
    """A number that this project aims for, and the measured one."""

    name: str
    wanted: str
    measured: str
    met: bool


@dataclass
class Report:
    """Grows line by line, so that a measurement that fails keeps its earlier lines."""

    lines: list[Line] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)
    """Numbers from one measurement that a goal of another one needs."""

    def add(self, line: Line) -> None:
        """Keeps the line, and prints it to stderr."""
        self.lines.append(line)
        print("  ".join(filter(None, _cells(line))), file=sys.stderr, flush=True)

    def fail(self, what: str) -> None:
        """Keeps and prints a failure; it makes the exit code 1."""
        self.failures.append(what)
        print(f"FAIL {what}", file=sys.stderr, flush=True)

    def at_most(self, name: str, limit: float, value: float, unit: str) -> None:
        goal = Goal(name, f"<= {limit:g} {unit}", f"{value:.3g} {unit}", value <= limit)
        self.goals.append(goal)

    def at_least(self, name: str, limit: float, value: float, unit: str = "") -> None:
        wanted, measured = f">= {limit:g} {unit}", f"{value:.3g} {unit}"
        self.goals.append(Goal(name, wanted.strip(), measured.strip(), value >= limit))

    def line_table(self) -> str:
        """All lines, as Markdown."""
        head = ["item", "what", "ms", "floor ms", "floor/time", "peer/ours", "peak GB", "note"]
        return table(head, map(_cells, self.lines))

    def goal_table(self) -> str:
        """The goals of the measurements that ran, as Markdown."""
        rows = [[g.name, g.wanted, g.measured, "met" if g.met else "MISSED"] for g in self.goals]
        return table(["goal", "wanted", "measured", ""], rows)


def _cells(line: Line) -> list[str]:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    return [
        line.item,
        line.what,
        shown(line.ms, "{:.4g}"),
        shown(line.floor_ms, "{:.4g}"),
        shown(line.floor_share, "{:.1%}"),
        shown(line.peer_ratio, "{:.2f}x"),
        shown(line.peak_gb, "{:.1f}"),
        line.note,
    ]


@dataclass
class Bench:
    """The settings and the report of all measurements."""

    dist: Dist
    size: Size
    seconds: float
    """Duration of the timings of a measurement; models are built, and a round ends, beyond it."""
    folder: Path
    """A temporary folder for tokenizer, image processor, configs and runs."""
    report: Report
    item: str = ""
    """The current measurement, as `--items` names it."""
    attention: str = "auto"
    """`policy.attn_implementation`; 'sdpa' once a check has found the fast kernel to be wrong."""

    @property
    def device(self) -> str:
        """'cuda:0' or 'cpu'."""
        return self.dist.device

    @property
    def dtype(self) -> str:
        """dtype of all weights."""
        return "bfloat16" if self.device.startswith("cuda") else "float32"

    def floor_ms(self, flops: float) -> float:
        """Time of these FLOPs at the rate of matrix products, which a process measures once."""
        return 1e3 * flops / measure_flops_per_s(self.device, self.dtype)

    def log(self, what: str, *numbers: float | None, **more: Any) -> None:
        """Adds a line to the current measurement; arguments: `Line`'s fields from `what` on."""
        self.report.add(Line(self.item, what, *numbers, **more))

    def time(self, calls: Mapping[str, Call], share: float = 1.0) -> dict[str, Timing]:
        """`time_calls` for that share of `seconds`; reports and leaves out calls that fail here."""
        timings, refused = time_calls(self.device, calls, share * self.seconds)
        for name, reason in refused.items():
            self.log(name, note=f"does not run here: {reason}")
        return timings

    def log_time(
        self,
        what: str,
        timing: Timing,
        min_flops: float | None = None,
        peer: Timing | None = None,
        note: str = "",
    ) -> None:
        """Adds a timing. `min_flops`: fewest FLOPs of it; `peer`: timing of diffusers or TRL."""
        self.log(
            what,
            timing.ms,
            None if min_flops is None else self.floor_ms(min_flops),
            None if peer is None else peer.ms / timing.ms,
            timing.peak_gb,
            note,
        )


def time_calls(
    device: str, calls: Mapping[str, Call], seconds: float
) -> tuple[dict[str, Timing], dict[str, str]]:
    """(name -> timing, name -> error of a call that failed). Runs each call once to warm up, then
    all calls in turn, in one or more rounds, until `seconds` have passed."""
    running, refused = {}, {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # each kernel has its own error for unsupported inputs
            refused[name] = first_line(error)
        else:
            running[name] = call
            continue
        free(device)  # outside `except`, whose traceback keeps the failed call's tensors alive
    times_s: dict[str, list[float]] = {name: [] for name in running}
    peaks_gb = dict.fromkeys(running, 0.0)
    end_s = time.perf_counter() + seconds
    while running:
        for name, call in running.items():
            take_peak_memory_gb(device)
            times_s[name].append(timed_s(device, call))
            peaks_gb[name] = max(peaks_gb[name], take_peak_memory_gb(device))
        if time.perf_counter() >= end_s:
            break
    timings = {
        name: Timing(1e3 * statistics.median(taken), len(taken), peaks_gb[name])
        for name, taken in times_s.items()
    }
    return timings, refused


def timed_s(device: str, call: Call) -> float:
    """Wall seconds of the call; waits for the device before and after it."""
    synchronize(device)
    start_s = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start_s


def synchronize(device: str) -> None:
    """Waits until the device has run all launched kernels."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def free(device: str) -> None:
    """Frees unreachable objects and torch's cached memory."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    """'OutOfMemoryError: CUDA out of memory. ...', cut for a table, paths without folders."""
    text = re.sub(r"(/[\w.@+-]+)+/", "", str(error).strip().split("\n")[0])
    return f"{type(error).__name__}: {text}"[:200]


@contextmanager
def cleared(device: str) -> Iterator[None]:
    """Frees memory after the block."""
    try:
        yield
    finally:
        free(device)
