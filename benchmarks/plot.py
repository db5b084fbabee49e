"""Plots the figure of `side_by_side.py`'s report."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.experiments import MEMO, ONE_STEP_OFF, OURS, PREFIX, PREFIXES, STOCK, TUNED, Record
from benchmarks.link import JUDGE_WAIT, PARTS, POLICY_PARTS
from benchmarks.report import cpu_s, gflop, median_s

COLOURS = {
    STOCK: "#c8c8c8",
    TUNED: "#9a9a9a",
    MEMO: "#6b8ba4",
    PREFIX: "#3d6482",
    PREFIXES: "#1b3a4b",
    OURS: "#d1495b",
    ONE_STEP_OFF: "#edae49",
}


def plot(results: Record, path: Path) -> None:
    """Plots policy GFLOP and memory by group size, time by part, and waits by judge latency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    _plot_growth(axes[0][0], results["sweep"])
    _plot_parts(axes[0][1], results["sweep"]["G = 8"])
    _plot_memory(axes[1][0], results["memory"])
    _plot_waits(axes[1][1], results["latency"])
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _plot_growth(axis: Any, records: Mapping[str, Record]) -> None:
    shapes = [name for name in records if name.startswith("G = ")]
    sizes = [records[name]["shape"]["group"] for name in shapes]
    for setup in records["G = 8"]["sides"]:
        if not all(setup in records[name]["sides"] for name in shapes):
            continue  # not measured at every size
        work = [gflop(records[name]["sides"][setup], POLICY_PARTS) for name in shapes]
        axis.plot(sizes, work, "o-", color=COLOURS[setup], label=setup)
    axis.set(title="policy side", xlabel="completions per prompt", ylabel="GFLOP", ylim=(0, None))
    axis.set_xticks(sizes)
    axis.legend(frameon=False)


def _plot_parts(axis: Any, record: Record) -> None:
    setups = record["sides"]
    bottoms = [0.0] * len(setups)
    groups: list[tuple[str, Sequence[str]]] = [("policy side", POLICY_PARTS)]
    groups += [(part, (part,)) for part in PARTS if part not in POLICY_PARTS]
    for i, (name, parts) in enumerate(groups):
        heights = [statistics.median(cpu_s(setup, parts)) for setup in setups.values()]
        if max(heights) < 0.01:
            continue
        axis.bar(list(setups), heights, bottom=bottoms, label=name, color=f"C{i}", width=0.6)
        bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
    axis.set(title="one iteration, G = 8", ylabel="CPU s")
    axis.tick_params(axis="x", rotation=20)
    axis.legend(frameon=False, fontsize="small")


def _plot_memory(axis: Any, peaks: Mapping[str, Mapping[str, float]]) -> None:
    sizes = [int(group) for group in peaks]
    for setup in peaks["8"]:
        peaks_mb = [by_setup[setup] for by_setup in peaks.values()]
        axis.plot(sizes, peaks_mb, "o-", color=COLOURS[setup], label=setup)
    axis.set(title="memory above baseline", xlabel="completions per prompt", ylabel="MB")
    axis.set(ylim=(0, None))
    axis.set_xticks(sizes)


def _plot_waits(axis: Any, records: Sequence[Record]) -> None:
    latencies_s = [record["latency_s"] for record in records]
    for setup in records[0]["sides"]:
        waited = [median_s(record["sides"][setup], [JUDGE_WAIT]) for record in records]
        axis.plot(latencies_s, waited, "o-", color=COLOURS[setup], label=setup)
    axis.set(title="waiting for the judge", xlabel="judge's latency, s", ylabel="s per iteration")
    axis.legend(frameon=False)
