"""Makes Markdown tables of the records of `experiments.py`; a peer is one of TRL's setups."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.experiments import OURS, TUNED, Record
from benchmarks.link import JUDGE_WAIT, PARTS, POLICY_PARTS

WHOLE = tuple(PARTS)
COUNTS = (
    "token positions",
    "pictures in the vision tower",
    "pictures preprocessed",
    "VAE encodes",
    "VAE decodes",
    "DiT forwards",
)


def cpu_s(setup: Record, parts: Iterable[str] = WHOLE) -> list[float]:
    """CPU seconds of each round, summed over the parts."""
    return _sums(setup["cpu_s"], parts)


def median_s(setup: Record, parts: Iterable[str] = WHOLE) -> float:
    """Median over rounds of the wall seconds, summed over the parts."""
    return statistics.median(_sums(setup["wall_s"], parts))


def _sums(by_part: Mapping[str, Sequence[float]], parts: Iterable[str]) -> list[float]:
    chosen = [by_part[part] for part in parts if part in by_part]
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
    """A sentence on how much more than this project the nearest peer computes, on the policy side
    and in a whole iteration, and one on the other peers."""
    setups = dict(record["sides"])
    ours = setups.pop(OURS)
    ours_gflop = gflop(ours, POLICY_PARTS)
    over = {name: gflop(setup, POLICY_PARTS) / ours_gflop for name, setup in setups.items()}
    nearest, *others = sorted(over, key=over.__getitem__)
    peer = setups[nearest]
    return (
        f"{nearest} takes {over[nearest]:.1f}x this project's FLOPs on the policy side and "
        f"{cpu_ratio(peer, ours)} its CPU seconds; in a whole iteration, with sampling and "
        f"rendering, {gflop(peer) / gflop(ours):.2f}x its FLOPs and "
        f"{cpu_ratio(peer, ours, WHOLE, digits=2)} its CPU seconds. (FLOPs of the policy side over "
        f"ours: {', '.join(f'{name} {over[name]:.1f}x' for name in others)}.)"
    )


def head_to_head(record: Record) -> str:
    """A table of the policy side by setup, and a table of the whole iteration by part."""
    setups = record["sides"]
    return f"{_policy_table(setups)}\n\n{_by_part(setups)}"


def _policy_table(setups: Mapping[str, Record]) -> str:
    rows = []
    for name, setup in setups.items():
        seconds, flops = cpu_s(setup, POLICY_PARTS), gflop(setup, POLICY_PARTS)
        over = ["", ""]
        if name != OURS:
            over = [
                cpu_ratio(setup, setups[OURS]),
                f"{flops / gflop(setups[OURS], POLICY_PARTS):.2f}x",
            ]
        cells = [f"{statistics.median(seconds):.2f}", over[0], f"{flops:.1f}", over[1]]
        rows.append([name, *cells, *(str(setup["counts"].get(count, 0)) for count in COUNTS[:3])])
    head = ["policy side of an iteration", "CPU s", "over ours", "GFLOP", "over ours", *COUNTS[:3]]
    return table(head, rows)


def _by_part(setups: Mapping[str, Record]) -> str:
    rows = []
    for name, parts in _PART_ROWS:
        seconds = [cpu_s(setup, parts) for setup in setups.values()]
        if max(map(max, seconds)) >= 5e-3:
            cells = [f"{statistics.median(rounds):.2f}" for rounds in seconds]
            flops = [f"{gflop(setup, parts):.1f}" for setup in setups.values()]
            rows.append([name, *(f"{s} / {n}" for s, n in zip(cells, flops, strict=True))])
    for name in COUNTS[3:]:
        rows.append([name, *(str(setup["counts"].get(name, 0)) for setup in setups.values())])
    return table(["CPU s / GFLOP per iteration", *setups], rows)


def cpu_ratio(
    peer: Record, ours: Record, parts: Sequence[str] = POLICY_PARTS, digits: int = 1
) -> str:
    """A peer's CPU seconds divided by ours: median, smallest and largest ratio of the rounds."""
    seconds = cpu_s(ours, parts)
    middle, low, high = ratio(cpu_s(peer, parts), seconds)
    spread = f"{low:.{digits}f} to {high:.{digits}f}" if len(seconds) > 1 else "one round"
    return f"{middle:.{digits}f}x ({spread})"


_PART_ROWS: Sequence[tuple[str, Sequence[str]]] = (
    ("policy side", POLICY_PARTS),
    *((part, (part,)) for part in PARTS if part not in POLICY_PARTS),
    ("whole iteration", WHOLE),
    ("whole iteration without sampling", [part for part in PARTS if part != "sampling"]),
)


def sweep(records: Mapping[str, Record]) -> str:
    """A table of each peer's policy side, divided by ours, per shape; '' where not measured."""
    peers = list(dict.fromkeys(p for record in records.values() for p in record["sides"]))
    peers.remove(OURS)
    rows = []
    for name, record in records.items():
        ours = record["sides"][OURS]
        cells = [f"{statistics.median(cpu_s(ours, POLICY_PARTS)):.2f}"]
        for peer in peers:
            setup = record["sides"].get(peer)
            flops = setup and gflop(setup, POLICY_PARTS) / gflop(ours, POLICY_PARTS)
            cells.append(f"{cpu_ratio(setup, ours)}; {flops:.1f}x" if setup else "")
        rows.append([name, *cells, f"{record['over_minimum']:.3f}"])
    head = ["policy side: CPU s over ours; FLOPs over ours", "ours, CPU s"]
    return table([*head, *peers, "ours over the minimum, FLOPs"], rows)


def memory(peaks_by_group: Mapping[str, Mapping[str, float]]) -> str:
    """MB above the baseline for each group size G, and MB per further completion."""
    rows = [
        [f"G = {group}", *(f"{peak:.0f}" for peak in peaks.values()), _ours_over_tuned(peaks)]
        for group, peaks in peaks_by_group.items()
    ]
    slopes = memory_slopes(peaks_by_group)
    growth = [f"{slope:.1f}" for slope in slopes.values()]
    rows.append(["one more completion", *growth, _ours_over_tuned(slopes)])
    return table(["peak MB above baseline", *slopes, "ours/tuned"], rows)


def _ours_over_tuned(by_setup: Mapping[str, float]) -> str:
    return f"{by_setup[OURS] / by_setup[TUNED]:.2f}"


def memory_slopes(peaks_by_group: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """MB per completion between the smallest and the largest group."""
    groups = sorted(peaks_by_group, key=int)
    few, many = groups[0], groups[-1]
    return {
        setup: (peaks_by_group[many][setup] - peaks_by_group[few][setup]) / (int(many) - int(few))
        for setup in peaks_by_group[few]
    }


def latencies(records: Sequence[Record]) -> str:
    """Wall seconds of an iteration, and the part that waits for the judge."""
    names = list(records[0]["sides"])

    def cell(setup: Record) -> str:
        wall, wait = median_s(setup), median_s(setup, [JUDGE_WAIT])
        return f"{wall:.2f} ({wait:.2f}, {wait / wall:.0%})"

    rows = [[f"{r['latency_s']:g} s", *(cell(r["sides"][name]) for name in names)] for r in records]
    return table(["judge's latency: wall s (exposed wait)", *names], rows)
