"""What `rl rehearse` prints: memory beside the plan, operations, host waits, mixed dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rl.memory.memory_plan import CONTEXT_GB
from rl.rehearsal.rehearsal import Rehearsed
from rl.rehearsal.tally import Line

PLANNED = {
    "condition": "condition",
    "render": "render",
    "learn_reference": "reference",
    "learn_backward": "learn",
    "learn_step": "step",
}
"""Phase of a rehearsal -> the same phase of the plan."""
NAMES = {
    "picture": "a picture's first forward",
    "condition": "condition",
    "render": "render",
    "reference": "reference and forwards ahead",
    "learn_reference": "reference",
    "learn_forward": "forward of the learner",
    "learn_backward": "backward",
    "learn": "loss and metrics",
    "learn_step": "optimizer step",
    "export": "export of the weights",
}
MAX_LINES = 30


def lines(done: Rehearsed, every_line: bool = False) -> Iterator[str]:
    """The report, at most 80 columns wide where paths allow it."""
    yield (
        f"one rank, {done.num_groups} groups, {done.num_prompt_tokens} prompt tokens, "
        f"{done.num_pictures} pictures, {done.seconds:.0f} s"
    )
    yield from _memory(done)
    if every_line:
        yield from _owners(done)
    yield ""
    yield from _work(done)
    yield ""
    yield from _waits(done, every_line)
    yield ""
    wrong = done.tally.wrong
    yield "mixed dtypes: none" if not wrong else "mixed dtypes, which a GPU refuses:"
    for (what, line), number in wrong.most_common():
        yield f"  {number} x {what}: {line}"


def peaks_gb(done: Rehearsed) -> dict[str, float]:
    """The plan's phase -> the most GPU memory in it, GB, without CUDA's own."""
    peak = done.tally.peak
    return {
        planned: peak[phase, "cuda"] / 1e9
        for phase, planned in PLANNED.items()
        if (phase, "cuda") in peak
    }


def _memory(done: Rehearsed) -> Iterator[str]:
    yield "GPU memory, GB          rehearsed     plan  plan is"
    for owner, num_bytes in done.weights_bytes.items():
        if num_bytes:
            rows = [] if done.plan is None else done.plan.rows
            prefix = {"policy": "policy weights"}.get(owner, f"{owner} ")
            planned = sum(
                row.gb
                for row in rows
                if row.part.startswith(prefix) and not row.part.endswith("working")
            )
            yield _row(f"{owner} weights", num_bytes / 1e9, planned or None)
    for phase, gb in peaks_gb(done).items():
        planned_gb = None if done.plan is None else done.plan.total_gb(phase) - CONTEXT_GB
        yield _row(f"peak of {phase!r}", gb, planned_gb)
    if done.plan is None:
        yield "  no plan: the sizes of the policy's model are not known to rl check"


def _owners(done: Rehearsed) -> Iterator[str]:
    """Which lines allocated what exists at the end of each phase; those of 0.1 GB and more."""
    for phase in PLANNED:
        if held := done.tally.held.get(phase):
            yield f"  held at the end of {NAMES[phase]}, by the line that allocated it"
            for line, num_bytes in held.most_common():
                if num_bytes >= 1e8:
                    yield f"    {num_bytes / 1e9:>7.2f}  {line or '(backward)'}"


def _row(name: str, gb: float, planned_gb: float | None) -> str:
    if planned_gb is None:
        return f"  {name:<22}{gb:>8.2f}"
    return f"  {name:<22}{gb:>9.2f}{planned_gb:>9.2f}  {planned_gb / gb - 1:+.1%}"


def _work(done: Rehearsed) -> Iterator[str]:
    yield "matrix products, convolutions and attention, TFLOP"
    for phase, name in NAMES.items():
        if flops := done.tally.flops[phase]:
            yield f"  {name:<32}{flops / 1e12:>9.1f}"


def waits_by_phase(done: Rehearsed) -> dict[str, Counter[tuple[str, Line]]]:
    """Phase -> (kind of wait, line) -> number, over all groups; loading is left out."""
    by_phase: dict[str, Counter[tuple[str, Line]]] = {name: Counter() for name in NAMES}
    for (phase, kind, line), number in done.tally.waits.items():
        if phase in by_phase:
            by_phase[phase][kind, line] += number
    return by_phase


def _waits(done: Rehearsed, every_wait: bool) -> Iterator[str]:
    by_phase = waits_by_phase(done)
    yield f"the host waits for the GPU, in {done.num_groups} groups, {done.num_pictures} pictures"
    for phase, name in NAMES.items():
        if found := by_phase[phase]:
            yield f"  {name}: {found.total()}"
            for (kind, line), number in found.most_common(None if every_wait else MAX_LINES):
                yield f"    {number} x {kind}: {line}"
