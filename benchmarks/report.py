"""From what `experiments.py` returns to what a person reads: numbers and tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.defeats import SAVINGS
from benchmarks.experiments import OURS, STOCK, TUNED, Record
from benchmarks.post import JUDGE_WAIT, PARTS, POLICY_PARTS

WHOLE = tuple(PARTS)
PEERS = (STOCK, TUNED)
SIDES = (*PEERS, OURS)
RATIOS = ("stock/ours", "tuned/ours")
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


def median_s(side: Record, parts: Iterable[str] = WHOLE) -> float:
    """Wall seconds of a round over those parts, the median."""
    return statistics.median(_sums(side["wall_s"], parts))


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


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; the first column to the left, the others to the right."""
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _seconds(record: Record, parts: Iterable[str]) -> list[str]:
    """Each side's median CPU seconds, and the peers' over ours."""
    *peers, ours = (cpu_s(record["sides"][side], parts) for side in SIDES)
    cells = [f"{statistics.median(seconds):.2f}" for seconds in (*peers, ours)]
    for peer in peers:
        middle, low, high = ratio(peer, ours)
        cells.append(f"{middle:.1f}x ({low:.1f} to {high:.1f})")
    return cells


def head_to_head(record: Record) -> str:
    """CPU seconds by part and their ratios, FLOPs, counts."""
    sides = [record["sides"][side] for side in SIDES]
    seconds, work = [], []
    for name, parts in _PART_ROWS:
        if max(max(cpu_s(side, parts)) for side in sides) >= 5e-3:
            seconds.append([name, *_seconds(record, parts)])
        flops = [gflop(side, parts) for side in sides]
        if max(flops) > 0:
            work.append([f"{name}, GFLOP", *(f"{n:.1f}" for n in flops), *_over(flops)])
    for name in COUNTS:
        counts = [side["counts"].get(name, 0) for side in sides]
        work.append([name, *map(str, counts), *_over(counts)])
    head = [*SIDES, *RATIOS]
    seconds_table = table(["CPU s per iteration", *head], seconds)
    return f"{seconds_table}\n\n{table(['work per iteration', *head], work)}"


_PART_ROWS: Sequence[tuple[str, Sequence[str]]] = (
    ("policy side", POLICY_PARTS),
    *((part, (part,)) for part in PARTS if part not in POLICY_PARTS),
    ("whole iteration", WHOLE),
    ("whole iteration but the sampling", [part for part in PARTS if part != "sampling"]),
)


def _over(values: Sequence[float], form: str = "{:.2f}x") -> list[str]:
    """The peers' over ours, which comes last."""
    *peers, ours = values
    return [form.format(peer / ours) if ours else "" for peer in peers]


def sweep(records: Mapping[str, Record]) -> str:
    """One row per shape: the policy side."""
    rows = []
    for name, record in records.items():
        flops = [gflop(record["sides"][side], POLICY_PARTS) for side in SIDES]
        over_minimum = f"{record['over_minimum']:.3f}"
        rows.append([name, *_seconds(record, POLICY_PARTS), *_over(flops, "{:.1f}x"), over_minimum])
    flops_head = [*(f"FLOPs {peers}" for peers in RATIOS), "ours over the minimum"]
    return table(["policy side, CPU s", *SIDES, *RATIOS, *flops_head], rows)


def memory(peaks_by_group: Mapping[str, Mapping[str, float]]) -> str:
    """MB above baseline over G, and what one more completion takes."""
    rows = [
        [f"G = {group}", *(f"{peaks[side]:.0f}" for side in SIDES), _share(peaks)]
        for group, peaks in peaks_by_group.items()
    ]
    slopes = memory_slopes(peaks_by_group)
    growth = [f"{slopes[side]:.1f}" for side in SIDES]
    rows.append(["one more completion", *growth, _share(slopes)])
    return table(["peak MB above baseline", *SIDES, "ours/tuned"], rows)


def _share(of: Mapping[str, float]) -> str:
    return f"{of[OURS] / of[TUNED]:.2f}"


def memory_slopes(peaks_by_group: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """MB per completion between the smallest and the largest group."""
    groups = sorted(peaks_by_group, key=int)
    few, many = groups[0], groups[-1]
    return {
        side: (peaks_by_group[many][side] - peaks_by_group[few][side]) / (int(many) - int(few))
        for side in SIDES
    }


def latencies(records: Sequence[Record]) -> str:
    """Wall seconds an iteration, and of them those that wait for the judge."""
    names = list(records[0]["sides"])

    def cell(side: Record) -> str:
        wall, wait = median_s(side), median_s(side, [JUDGE_WAIT])
        return f"{wall:.2f} ({wait:.2f}, {wait / wall:.0%})"

    rows = [[f"{r['latency_s']:g} s", *(cell(r["sides"][name]) for name in names)] for r in records]
    return table(["judge's latency: wall s (exposed wait)", *names], rows)


def savings(records: Mapping[str, Record]) -> str:
    """What each brought, alone and stacked on those above it."""

    def cost(name: str) -> tuple[float, float]:
        return gflop(records[name]), statistics.median(cpu_s(records[name]))

    def cells(of: tuple[float, float]) -> list[str]:
        return [f"{of[0]:.0f}", f"{of[1]:.2f}"]

    def gain(more: tuple[float, float], less: tuple[float, float]) -> str:
        return f"{more[0] / less[0]:.2f}x / {more[1] / less[1]:.2f}x"

    none = before = cost("none")
    rows = [["none", *cells(none), "", "", *cells(none)]]
    for i, (name, saving) in enumerate(SAVINGS.items()):
        alone = cost(f"alone {name}")
        stacked = cost(f"stacked {name}") if i else alone
        gains = gain(none, alone), gain(before, stacked)
        rows.append([saving.title, *cells(alone), *gains, *cells(stacked)])
        before = stacked
    rows.append(["all", "", "", "", gain(none, before), "", ""])
    head = ["saving", "alone GFLOP", "alone CPU s", "alone: FLOPs / CPU", "on top: FLOPs / CPU"]
    return table([*head, "stacked GFLOP", "stacked CPU s"], rows)


def ranks(record: Record) -> str:
    """One rank and two: the same numbers, and what travels."""
    one, two = record["1"], record["2"]
    sent = [counts.get("bytes to other ranks", 0) for counts in two["counts"]]
    difference = f"{metric_difference(record):.1e}"
    positions = [counts["token positions"] for counts in two["counts"]]
    rows = [
        ["largest relative difference of any metric of an iteration", difference],
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
