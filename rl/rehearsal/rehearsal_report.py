"""What `rl rehearse` prints: memory beside the plan, operations, host waits, mixed dtypes."""

from __future__ import annotations

from collections.abc import Iterator

from rl.check.memory_plan import CONTEXT_GB
from rl.rehearsal.rehearsal import Rehearsed

PLANNED = {
    "load": ("load",),
    "condition": ("condition",),
    "render": ("render",),
    "reference": ("reference", "learn_reference"),
    "learn": ("learn_forward", "learn_backward"),
    "step": ("learn_step",),
}
"""Phase of the memory plan -> its phases in a rehearsal."""
NAMES = {
    "picture": "a picture's first forward",
    "condition": "condition",
    "render": "render",
    "reference": "prefetched reference, forwards",
    "learn_reference": "reference",
    "learn_forward": "forward of the learner",
    "learn_backward": "backward",
    "learn": "loss and metrics",
    "learn_step": "optimizer step",
    "export": "export of the weights",
}
"""Phase of a rehearsal -> its name in the report; what happens while models load is left out."""
MAX_LINES = 30


def lines(done: Rehearsed, every_line: bool = False) -> Iterator[str]:
    """The report, at most 80 columns wide where paths allow it."""
    tally = done.tally
    yield (
        f"one rank, {done.num_groups} groups, {done.num_prompt_tokens} prompt tokens, "
        f"{done.num_pictures} pictures, {done.seconds:.0f} s"
    )
    yield from _memory(done)
    yield "\nmatrix products, convolutions and attention, TFLOP"
    for phase, name in NAMES.items():
        if flops := tally.flops[phase]:
            yield f"  {name:<32}{flops / 1e12:>9.1f}"
    yield f"\nwaits of the host for the GPU: {done.num_groups} groups, {done.num_pictures} pictures"
    for phase, name in NAMES.items():
        if waits := tally.waits[phase]:
            yield f"  {name}: {waits.total()}"
            for line, number in waits.most_common(None if every_line else MAX_LINES):
                yield f"    {number} x {line}"
    yield "\nmixed dtypes, which a GPU refuses:" if tally.mixed_dtypes else "\nmixed dtypes: none"
    yield from (f"  {number} x {line}" for line, number in tally.mixed_dtypes.most_common())


def peaks_gb(done: Rehearsed) -> dict[str, float]:
    """The plan's phase -> its peak GPU memory in GB, without the CUDA context."""
    peaks = {name: max(done.tally.peak[phase] for phase in PLANNED[name]) for name in PLANNED}
    return {name: peak / 1e9 for name, peak in peaks.items() if peak}


def _memory(done: Rehearsed) -> Iterator[str]:
    yield "GPU memory, GB          rehearsed     plan  error"
    rows = [] if done.plan is None else done.plan.rows
    for owner, num_bytes in done.weights_bytes.items():
        prefix = "policy weights" if owner == "policy" else f"{owner} "
        planned = sum(row.gb for row in rows if row.part.startswith(prefix))
        if num_bytes:
            yield _row(f"{owner} weights", num_bytes / 1e9, planned or None)
    for phase, gb in peaks_gb(done).items():
        planned_gb = None if done.plan is None else done.plan.total_gb(phase) - CONTEXT_GB
        yield _row(f"peak of {phase!r}", gb, planned_gb)
    if done.plan is None:
        yield "  no plan: rl check does not know the sizes of the policy's model"


def _row(name: str, gb: float, planned_gb: float | None) -> str:
    planned = "" if planned_gb is None else f"{planned_gb:>9.2f}  {planned_gb / gb - 1:+.1%}"
    return f"  {name:<22}{gb:>9.2f}{planned}"
