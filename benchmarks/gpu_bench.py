"""What every GPU measurement shares: the clock, the lines it writes, the goals it is held to."""

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
    """One contender of a race."""

    ms: float
    """Median of the rounds."""
    num_rounds: int
    peak_gb: float
    """Peak memory that torch held in a round, weights included; on a CPU, the process so far."""


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    item: str
    what: str
    ms: float | None = None
    floor_ms: float | None = None
    """What the same operations take at the rate of matrix products measured on this device."""
    peer_ratio: float | None = None
    """The peer's time over this one, in the same run."""
    peak_gb: float | None = None
    note: str = ""

    @property
    def floor_share(self) -> float | None:
        """1 at best."""
        return None if self.ms is None or self.floor_ms is None else self.floor_ms / self.ms


@dataclass(frozen=True)
class Goal:
    """A number this project set itself, beside the measured one."""

    name: str
    wanted: str
    measured: str
    met: bool


@dataclass
class Report:
    """Grows line by line, so that an item that fails keeps what it had."""

    lines: list[Line] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)
    """What one item leaves for a goal of another."""

    def add(self, line: Line) -> None:
        """Keep it, and tell it at once."""
        self.lines.append(line)
        told = "  ".join(filter(None, _cells(line)))
        print(told, file=sys.stderr, flush=True)

    def fail(self, what: str) -> None:
        """Something is wrong: the exit code will say so."""
        self.failures.append(what)
        print(f"FAIL {what}", file=sys.stderr, flush=True)

    def at_most(self, name: str, limit: float, value: float, unit: str) -> None:
        goal = Goal(name, f"<= {limit:g} {unit}", f"{value:.3g} {unit}", value <= limit)
        self.goals.append(goal)

    def at_least(self, name: str, limit: float, value: float, unit: str = "") -> None:
        wanted, measured = f">= {limit:g} {unit}", f"{value:.3g} {unit}"
        self.goals.append(Goal(name, wanted.strip(), measured.strip(), value >= limit))

    def line_table(self) -> str:
        """Markdown."""
        head = ["item", "what", "ms", "floor ms", "floor/time", "peer/ours", "peak GB", "note"]
        return table(head, map(_cells, self.lines))

    def goal_table(self) -> str:
        """Markdown; goals whose item was not run are not there."""
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
    """What an item is given."""

    dist: Dist
    size: Size
    seconds: float
    """For which an item measures, building models not counted; what has begun is finished."""
    folder: Path
    """Temporary: tokenizer, image processor, configs, runs."""
    report: Report
    item: str = ""
    """The one under way."""
    attention: str = "auto"
    """`policy.attn_implementation`, until a check finds that the fast kernel is wrong."""
    """Of the renderer, once it was seen to pay."""

    @property
    def device(self) -> str:
        """'cuda:0' or 'cpu'."""
        return self.dist.device

    @property
    def dtype(self) -> str:
        """Of all weights."""
        return "bfloat16" if self.device.startswith("cuda") else "float32"

    def floor_ms(self, flops: float) -> float:
        """At the rate of matrix products, which is measured once a process."""
        return 1e3 * flops / measure_flops_per_s(self.device, self.dtype)

    def tell(self, what: str, *numbers: float | None, **more: Any) -> None:
        """A line of the item under way: `Line`'s fields from `what` on."""
        self.report.add(Line(self.item, what, *numbers, **more))

    def race(self, calls: Mapping[str, Call], share: float = 1.0) -> dict[str, Timing]:
        """See `race`; a call that does not run here is told and left out. `share`: of `seconds`."""
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
        """A line of a race's outcome; `floor`: the least operations, `peer`: who did the same."""
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
    """(timings, why others did not run): every call once to warm up, then all in turn, round by
    round, until `seconds` are over; one round at least."""
    running, refused = {}, {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # kernels say in their own ways that they cannot
            refused[name] = first_line(error)
        else:
            running[name] = call
            continue
        free(device)  # out here, where no traceback holds the failed call's tensors
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
    """Wall seconds, the device idle before and after."""
    synchronize(device)
    start_s = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start_s


def synchronize(device: str) -> None:
    """Wait for all that was launched."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def free(device: str) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    """'OutOfMemoryError: CUDA out of memory. ...', short enough for a table, without folders."""
    text = re.sub(r"(/[\w.@+-]+)+/", "", str(error).strip().split("\n")[0])
    return f"{type(error).__name__}: {text}"[:200]


@contextmanager
def cleared(device: str) -> Iterator[None]:
    """Memory is free again behind the block."""
    try:
        yield
    finally:
        free(device)
