"""Makes Markdown tables of the records of `experiments.py`; a peer is one of TRL's setups."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.experiments import OURS, Record
from benchmarks.link import JUDGE_WAIT, PARTS, POLICY_PARTS

WHOLE = tuple(PARTS)


def seconds(setup: Record, parts: Iterable[str] = WHOLE, kind: str = "cpu_s") -> list[float]:
    """CPU seconds (or 'wall_s') of each round, summed over the parts."""
    chosen = [setup[kind][part] for part in parts if part in setup[kind]]
    return [sum(values) for values in zip(*chosen, strict=True)] or [0.0]


def gflop(setup: Record, parts: Iterable[str] = WHOLE) -> float:
    """GFLOP of one iteration, summed over the parts."""
    return sum(setup["gflop"].get(part, 0.0) for part in parts)


def ratio(peer: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """(median, smallest, largest) of the ratios of the rounds."""
    ratios = [a / b for a, b in zip(peer, ours, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right-aligned."""
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def lead(record: Record) -> str:
    """How much more than this project the nearest peer computes, on the policy side and in a whole
    iteration, and how far this project is from the minimum."""
    setups = dict(record["sides"])
    ours = setups.pop(OURS)
    nearest = min(setups, key=lambda name: gflop(setups[name], POLICY_PARTS))
    peer, least = setups[nearest], gflop(ours, POLICY_PARTS)
    return (
        f"{nearest} takes {gflop(peer, POLICY_PARTS) / least:.1f}x this project's FLOPs on the "
        f"policy side and {cpu_ratio(peer, ours)} its CPU seconds; in a whole iteration, with "
        f"sampling and rendering, {gflop(peer) / gflop(ours):.2f}x its FLOPs and "
        f"{cpu_ratio(peer, ours, WHOLE, digits=2)} its CPU seconds. This project executes "
        f"{least:.2f} GFLOP there, {record['over_minimum']:.3f} times the minimum."
    )


def head_to_head(record: Record) -> str:
    """A table of the iteration by part; its first row is the policy side over this project's."""
    setups, rows = record["sides"], []
    for name, parts in _PART_ROWS:
        spent = [seconds(setup, parts) for setup in setups.values()]
        if max(map(max, spent)) >= 5e-3:
            cells = [f"{statistics.median(rounds):.2f}" for rounds in spent]
            flops = [f"{gflop(setup, parts):.1f}" for setup in setups.values()]
            rows.append([name, *(f"{s} / {n}" for s, n in zip(cells, flops, strict=True))])
    ours = gflop(setups[OURS], POLICY_PARTS)
    over = (
        f"{cpu_ratio(setup, setups[OURS])} / {gflop(setup, POLICY_PARTS) / ours:.2f}x"
        for setup in setups.values()
    )
    rows.insert(0, ["policy side over this project's", *over])
    return table(["CPU s / GFLOP per iteration", *setups], rows)


def cpu_ratio(
    peer: Record, ours: Record, parts: Sequence[str] = POLICY_PARTS, digits: int = 1
) -> str:
    """A peer's CPU seconds divided by ours: median, smallest and largest ratio of the rounds."""
    middle, low, high = ratio(seconds(peer, parts), seconds(ours, parts))
    spread = f"{low:.{digits}f} to {high:.{digits}f}" if len(seconds(ours)) > 1 else "one round"
    return f"{middle:.{digits}f}x ({spread})"


_PART_ROWS: Sequence[tuple[str, Sequence[str]]] = (
    ("policy side", POLICY_PARTS),
    *((part, (part,)) for part in PARTS if part not in POLICY_PARTS),
    ("whole iteration", WHOLE),
)


def memory(peaks_by_group: Mapping[str, Mapping[str, float]]) -> str:
    """MB above the baseline for each group size G."""
    rows = [
        [f"G = {group}", *(f"{peak:.0f}" for peak in peaks.values())]
        for group, peaks in peaks_by_group.items()
    ]
    return table(["peak MB above baseline", *next(iter(peaks_by_group.values()))], rows)


def latencies(records: Sequence[Record]) -> str:
    """Wall seconds of an iteration, and the part that waits for the judge."""
    names = list(records[0]["sides"])

    def cell(setup: Record) -> str:
        wall, wait = (
            statistics.median(seconds(setup, parts, "wall_s")) for parts in (WHOLE, [JUDGE_WAIT])
        )
        return f"{wall:.2f} ({wait:.2f}, {wait / wall:.0%})"

    rows = [[f"{r['latency_s']:g} s", *(cell(r["sides"][name]) for name in names)] for r in records]
    return table(["judge's latency: wall s (exposed wait)", *names], rows)
