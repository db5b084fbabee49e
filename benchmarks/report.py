"""From records to what a person reads: numbers and tables.

What: pure functions over what `experiments.py` returns. What not: any measuring, the goals
(`goals.py`), the plot (`plot.py`). Called by those two and `side_by_side.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.defeats import SAVINGS
from benchmarks.experiments import OURS, STOCK, TUNED, Record
from benchmarks.post import JUDGE_WAIT, PARTS, POLICY_PARTS

WHOLE = tuple(PARTS)
PEERS = (STOCK, TUNED)
COUNTS = (
    "token positions",
    "pictures in the vision tower",
    "pictures preprocessed",
    "VAE encodes",
    "VAE decodes",
    "DiT forwards",
)


def cpu_s(side: Record, parts: Iterable[str] = WHOLE) -> list[float]:
    """Of each round, over those parts."""
    return _sums(side["cpu_s"], parts)


def wall_s(side: Record, parts: Iterable[str] = WHOLE) -> list[float]:
    """Of each round, over those parts."""
    return _sums(side["wall_s"], parts)


def _sums(by_part: Mapping[str, Sequence[float]], parts: Iterable[str]) -> list[float]:
    chosen = [by_part[part] for part in parts if part in by_part]
    return [sum(values) for values in zip(*chosen, strict=True)] or [0.0]


def gflop(side: Record, parts: Iterable[str] = WHOLE) -> float:
    """Of one iteration, over those parts."""
    return sum(side["gflop"].get(part, 0.0) for part in parts)


def ratio(peer: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """(median, smallest, largest) of the rounds' own ratios."""
    ratios = [a / b for a, b in zip(peer, ours, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def _times(values: tuple[float, float, float]) -> str:
    middle, low, high = values
    return f"{middle:.1f}x ({low:.1f} to {high:.1f})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; the first column to the left, the others to the right."""
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def head_to_head(record: Record) -> str:
    """CPU seconds by part and their ratios, FLOPs, counts."""
    sides = record["sides"]
    rows = []
    for name, parts in _PART_ROWS:
        seconds = {side: cpu_s(sides[side], parts) for side in (STOCK, TUNED, OURS)}
        if max(map(max, seconds.values())) < 5e-3:
            continue
        ratios = [_times(ratio(seconds[peer], seconds[OURS])) for peer in PEERS]
        rows.append([name, *(f"{statistics.median(s):.2f}" for s in seconds.values()), *ratios])
    seconds_table = table(
        ["CPU s per iteration", STOCK, TUNED, OURS, "stock/ours", "tuned/ours"], rows
    )
    rows = []
    for name, parts in _PART_ROWS:
        flops = [gflop(sides[side], parts) for side in (STOCK, TUNED, OURS)]
        if max(flops) > 0:
            ratios = [f"{peer / flops[2]:.2f}x" if flops[2] else "" for peer in flops[:2]]
            rows.append([f"{name}, GFLOP", *(f"{value:.1f}" for value in flops), *ratios])
    for name in COUNTS:
        counts = [sides[side]["counts"].get(name, 0) for side in (STOCK, TUNED, OURS)]
        ratios = [f"{peer / counts[2]:.2f}x" if counts[2] else "" for peer in counts[:2]]
        rows.append([name, *map(str, counts), *ratios])
    work_table = table(["work per iteration", STOCK, TUNED, OURS, "stock/ours", "tuned/ours"], rows)
    return f"{seconds_table}\n\n{work_table}"


_PART_ROWS: Sequence[tuple[str, Sequence[str]]] = (
    ("policy side", POLICY_PARTS),
    *((part, (part,)) for part in PARTS if part not in POLICY_PARTS),
    ("whole iteration", WHOLE),
    ("whole iteration but the sampling", [part for part in PARTS if part != "sampling"]),
)


def sweep(records: Mapping[str, Record]) -> str:
    """One row per shape: the policy side."""
    rows = []
    for name, record in records.items():
        sides = record["sides"]
        seconds = {side: cpu_s(sides[side], POLICY_PARTS) for side in (STOCK, TUNED, OURS)}
        flops = {side: gflop(sides[side], POLICY_PARTS) for side in (STOCK, TUNED, OURS)}
        rows.append(
            [
                name,
                *(f"{statistics.median(s):.2f}" for s in seconds.values()),
                *(_times(ratio(seconds[peer], seconds[OURS])) for peer in PEERS),
                *(f"{flops[peer] / flops[OURS]:.1f}x" for peer in PEERS),
                f"{record['over_minimum']:.3f}",
            ]
        )
    head = ["policy side, CPU s", STOCK, TUNED, OURS, "stock/ours", "tuned/ours"]
    flops_head = ["FLOPs stock/ours", "FLOPs tuned/ours", "ours over the minimum"]
    return table([*head, *flops_head], rows)


def memory(peaks_by_group: Mapping[str, Mapping[str, float]]) -> str:
    """MB above baseline over G, and what one more completion takes."""
    rows = [
        [f"G = {group}", *(f"{peaks[s]:.0f}" for s in (STOCK, TUNED, OURS)), _share(peaks)]
        for group, peaks in peaks_by_group.items()
    ]
    slopes = memory_slopes(peaks_by_group)
    rows.append(
        ["one more completion", *(f"{slopes[s]:.1f}" for s in (STOCK, TUNED, OURS)), _share(slopes)]
    )
    return table(["peak MB above baseline", STOCK, TUNED, OURS, "ours/tuned"], rows)


def _share(of: Mapping[str, float]) -> str:
    return f"{of[OURS] / of[TUNED]:.2f}"


def memory_slopes(peaks_by_group: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """MB per completion between the smallest and the largest group."""
    groups = sorted(peaks_by_group, key=int)
    few, many = groups[0], groups[-1]
    return {
        side: (peaks_by_group[many][side] - peaks_by_group[few][side]) / (int(many) - int(few))
        for side in (STOCK, TUNED, OURS)
    }


def latencies(records: Sequence[Record]) -> str:
    """Wall seconds an iteration, and of them those that wait for the judge."""
    names = list(records[0]["sides"])
    rows = []
    for record in records:
        cells = []
        for name in names:
            side = record["sides"][name]
            wall, wait = statistics.median(wall_s(side)), statistics.median(waits(side))
            cells.append(f"{wall:.2f} ({wait:.2f}, {wait / wall:.0%})")
        rows.append([f"{record['latency_s']:g} s", *cells])
    return table(["judge's latency: wall s (exposed wait)", *names], rows)


def waits(side: Record) -> list[float]:
    """Wall seconds of each round in which nothing is computed because of the judge."""
    return wall_s(side, [JUDGE_WAIT])


def savings(records: Mapping[str, Record]) -> str:
    """What each brought, alone and stacked on those above it."""

    def cells(record: Record) -> tuple[float, float]:
        return gflop(record), statistics.median(cpu_s(record))

    none = cells(records["none"])
    rows = [
        ["none", f"{none[0]:.0f}", f"{none[1]:.2f}", "", "", f"{none[0]:.0f}", f"{none[1]:.2f}"]
    ]
    before = none
    for i, (name, saving) in enumerate(SAVINGS.items()):
        alone = cells(records[f"alone {name}"])
        stacked = cells(records[f"stacked {name}"]) if i else alone
        rows.append(
            [
                saving.title,
                f"{alone[0]:.0f}",
                f"{alone[1]:.2f}",
                f"{none[0] / alone[0]:.2f}x / {none[1] / alone[1]:.2f}x",
                f"{before[0] / stacked[0]:.2f}x / {before[1] / stacked[1]:.2f}x",
                f"{stacked[0]:.0f}",
                f"{stacked[1]:.2f}",
            ]
        )
        before = stacked
    rows.append(
        ["all", "", "", "", f"{none[0] / before[0]:.2f}x / {none[1] / before[1]:.2f}x", "", ""]
    )
    head = ["saving", "alone GFLOP", "alone CPU s", "alone: FLOPs / CPU", "on top: FLOPs / CPU"]
    return table([*head, "stacked GFLOP", "stacked CPU s"], rows)


def ranks(record: Record) -> str:
    """One rank and two: the same numbers, and what travels."""
    one, two = record["1"], record["2"]
    sent = [counts.get("bytes to other ranks", 0) for counts in two["counts"]]
    positions = [counts["token positions"] for counts in two["counts"]]
    rows = [
        [
            "largest relative difference of any metric of an iteration",
            f"{metric_difference(record):.1e}",
        ],
        ["bytes of the trained weights (float32)", f"{record['trained_bytes']:,}"],
        ["bytes a rank brings per step, gradients and numbers", f"{max(sent):,}"],
        ["over the trained bytes", f"{max(sent) / record['trained_bytes']:.3f}"],
        ["token positions of each rank", ", ".join(map(str, positions))],
        ["token positions of one rank alone", str(one["counts"][0]["token positions"])],
    ]
    return table(["1 rank -> 2 ranks", "measured"], rows)


def metric_difference(record: Record) -> float:
    """Over the first iteration's losses, KL, gradient norm and rewards. (Before the second one the
    stub judge draws its lots from pictures whose last bits have moved.)"""
    one, two = (
        next(row for row in record[n]["metrics"] if "loss/total" in row) for n in ("1", "2")
    )
    return max(abs(one[key] - two[key]) / max(abs(one[key]), 1e-6) for key in one)
