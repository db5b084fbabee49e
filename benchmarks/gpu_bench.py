"""Shared by all GPU measurements: timing, lines of the table, and goals."""

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
    """The result of one call in a race."""

    ms: float
    """Median of the rounds."""
    num_rounds: int
    peak_gb: float
    """Peak memory of torch in a round, weights included; on a CPU, of the process so far."""


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    item: str
    what: str
    ms: float | None = None
    floor_ms: float | None = None
    """Time of the same operations at the rate of matrix products measured on this device."""
    peer_ratio: float | None = None
    """The peer's time over this time, in the same run."""
    peak_gb: float | None = None
    note: str = ""

    @property
    def floor_share(self) -> float | None:
        """`floor_ms` over the measured time; 1 is the best."""
        return None if self.ms is None or self.floor_ms is None else self.floor_ms / self.ms


@dataclass(frozen=True)
class Goal:
    """A goal of this project and the measured value."""

    name: str
    wanted: str
    measured: str
    met: bool


@dataclass
class Report:
    """Grows line by line, so that a failed item keeps its lines."""

    lines: list[Line] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)
    """Values of one item that a goal of another item uses."""

    def add(self, line: Line) -> None:
        """Adds a line and prints it."""
        self.lines.append(line)
        print("  ".join(filter(None, _cells(line))), file=sys.stderr, flush=True)

    def fail(self, problem: str) -> None:
        """Records a failure, which sets the exit code."""
        self.failures.append(problem)
        print(f"FAIL {problem}", file=sys.stderr, flush=True)

    def at_most(self, name: str, limit: float, value: float, unit: str) -> None:
        goal = Goal(name, f"<= {limit:g} {unit}", f"{value:.3g} {unit}", value <= limit)
        self.goals.append(goal)

    def at_least(self, name: str, limit: float, value: float, unit: str = "") -> None:
        wanted, measured = f">= {limit:g} {unit}", f"{value:.3g} {unit}"
        self.goals.append(Goal(name, wanted.strip(), measured.strip(), value >= limit))

    def line_table(self) -> str:
        """The lines as Markdown."""
        head = ["item", "what", "ms", "floor ms", "floor/time", "peer/ours", "peak GB", "note"]
        return table(head, map(_cells, self.lines))

    def goal_table(self) -> str:
        """The goals of the items that ran, as Markdown."""
        rows = [[g.name, g.wanted, g.measured, "met" if g.met else "MISSED"] for g in self.goals]
        return table(["goal", "wanted", "measured", ""], rows)


def _cells(line: Line) -> list[str]:
    def cell(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    return [
        line.item,
        line.what,
        cell(line.ms, "{:.4g}"),
        cell(line.floor_ms, "{:.4g}"),
        cell(line.floor_share, "{:.1%}"),
        cell(line.peer_ratio, "{:.2f}x"),
        cell(line.peak_gb, "{:.1f}"),
        line.note,
    ]


@dataclass
class Bench:
    """The input of every item."""

    dist: Dist
    size: Size
    seconds: float
    """Time for which an item measures, without building models; a begun round is finished."""
    folder: Path
    """Temporary: tokenizer, image processor, configs, runs."""
    report: Report
    item: str = ""
    """The current item."""
    attention: str = "auto"
    """`policy.attn_implementation`; 'sdpa' after a check found that the fast kernel is wrong."""

    @property
    def device(self) -> str:
        """'cuda:0' or 'cpu'."""
        return self.dist.device

    @property
    def dtype(self) -> str:
        """The dtype of all weights."""
        return "bfloat16" if self.device.startswith("cuda") else "float32"

    def floor_ms(self, flops: float) -> float:
        """Time of `flops` at the rate of matrix products, which is measured once per process."""
        return 1e3 * flops / measure_flops_per_s(self.device, self.dtype)

    def tell(self, what: str, *numbers: float | None, **more: Any) -> None:
        """Adds a line of the current item: `Line`'s fields from `what` on."""
        self.report.add(Line(self.item, what, *numbers, **more))

    def race(self, calls: Mapping[str, Call], share: float = 1.0) -> dict[str, Timing]:
        """`race` for a share of `seconds`; a call that does not run here only gets a line."""
        timings, refused = race(self.device, calls, share * self.seconds)
        for name, reason in refused.items():
            self.tell(name, note=f"does not run here: {reason}")
        return timings

    def tell_time(
        self,
        what: str,
        timing: Timing,
        floor: float | None = None,
        peer: Timing | None = None,
        note: str = "",
    ) -> None:
        """Adds a line of a race's result; `floor`: minimum of operations, `peer`: its timing."""
        self.tell(
            what,
            timing.ms,
            None if floor is None else self.floor_ms(floor),
            None if peer is None else peer.ms / timing.ms,
            timing.peak_gb,
            note,
        )


def race(
    device: str, calls: Mapping[str, Call], seconds: float
) -> tuple[dict[str, Timing], dict[str, str]]:
    """(timings, reasons why others did not run): every call once to warm up, then all in turn,
    round by round, for `seconds` and at least one round."""
    running, refused = {}, {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # kernels raise various errors if they cannot run
            refused[name] = first_line(error)
        else:
            running[name] = call
            continue
        free(device)  # outside `except`, where no traceback refers to the failed call's tensors
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
        name: Timing(1e3 * statistics.median(samples_s), len(samples_s), peaks_gb[name])
        for name, samples_s in times_s.items()
    }
    return timings, refused


def timed_s(device: str, call: Call) -> float:
    """Wall seconds of a call, with the device idle before and after."""
    synchronize(device)
    start_s = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start_s


def synchronize(device: str) -> None:
    """Waits for the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def free(device: str) -> None:
    """Frees unreferenced memory of the device."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def relative_error(value: torch.Tensor, true: torch.Tensor) -> float:
    """|value - true| / |true|, Euclidean."""
    true = true.detach().double()
    return float((value.detach().double() - true).norm() / true.norm())


def first_line(error: BaseException) -> str:
    """'OutOfMemoryError: CUDA out of memory. ...', shortened for a table, without folders."""
    text = re.sub(r"(/[\w.@+-]+)+/", "", str(error).strip().split("\n")[0])
    return f"{type(error).__name__}: {text}"[:200]


@contextmanager
def cleared(device: str) -> Iterator[None]:
    """Frees the device's memory after the block."""
    try:
        yield
    finally:
        free(device)
