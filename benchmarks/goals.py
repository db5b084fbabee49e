"""Compares the results of `side_by_side.py` with the project's goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.experiments import ONE_STEP_OFF, OURS, STOCK, TUNED, Record
from benchmarks.link import JUDGE_WAIT, POLICY_PARTS, TAIL
from benchmarks.report import (
    WHOLE,
    cpu_s,
    gflop,
    median_s,
    memory_slopes,
    metric_difference,
    ratio,
    table,
)


def goals(results: Record) -> str:
    """A table with a row for each goal whose experiment was run."""
    rows = []
    for name, limit, measure in _GOALS:
        try:
            measured, met = measure(results)
        except KeyError:  # its experiment was not run
            continue
        rows.append([name, limit, measured, "yes" if met else "no"])
    return table(["goal", "wanted", "measured", "met"], rows)


def _at_most(limit: float, value: float, form: str = "{:.2f}") -> tuple[str, bool]:
    return form.format(value), value <= limit


def _flops(limit: float, peer: str) -> Callable[[Record], tuple[str, bool]]:
    def measure(results: Record) -> tuple[str, bool]:
        setups = results["sweep"]["T = 72"]["sides"]
        value = gflop(setups[peer], POLICY_PARTS) / gflop(setups[OURS], POLICY_PARTS)
        return f"{value:.1f}x", value >= limit

    return measure


def _cpu(
    limit: float, peer: str, shape: str, parts: Sequence[str] = POLICY_PARTS, form: str = "{:.1f}x"
) -> Callable[[Record], tuple[str, bool]]:
    def measure(results: Record) -> tuple[str, bool]:
        setups = results["sweep"][shape]["sides"]
        value, _, _ = ratio(cpu_s(setups[peer], parts), cpu_s(setups[OURS], parts))
        return form.format(value), value >= limit

    return measure


def _counted_once(results: Record) -> tuple[str, bool]:
    counts = results["sweep"]["G = 8"]["sides"][OURS]["counts"]
    names = ("pictures in the vision tower", "VAE encodes", "pictures preprocessed")
    numbers = [counts[name] for name in names]
    return ", ".join(map(str, numbers)), numbers == [1, 1, 1]


def _memory(results: Record) -> tuple[str, bool]:
    peaks = results["memory"]["8"]
    return _at_most(0.55, peaks[OURS] / peaks[TUNED])


def _memory_growth(results: Record) -> tuple[str, bool]:
    slopes = memory_slopes(results["memory"])
    return _at_most(0.2, slopes[OURS] / slopes[TUNED])


def _on_policy_wait(results: Record) -> tuple[str, bool]:
    """The largest excess over the allowed wait for any latency, as a share of the iteration."""
    worst = -1.0
    for record in results["latency"]:
        setup = record["sides"][OURS]
        allowed = max(0.0, record["latency_s"] - median_s(setup, [TAIL]))
        worst = max(worst, (median_s(setup, [JUDGE_WAIT]) - allowed) / median_s(setup))
    return f"{worst:.1%} beyond", worst <= 0.03


def _stale_wait(results: Record) -> tuple[str, bool]:
    free = median_s(results["latency"][0]["sides"][ONE_STEP_OFF])
    setups = [r["sides"][ONE_STEP_OFF] for r in results["latency"] if r["latency_s"] <= free]
    worst = max(median_s(setup, [JUDGE_WAIT]) / median_s(setup) for setup in setups)
    return f"{worst:.1%}", worst <= 0.02


def _bytes_sent(results: Record) -> tuple[str, bool]:
    ranks = results["ranks"]
    sent = max(counts.get("bytes to other ranks", 0) for counts in ranks["2"]["counts"])
    return _at_most(2.1, sent / ranks["trained_bytes"], "{:.3f}")


_GOALS: Sequence[tuple[str, str, Callable[[Record], tuple[str, bool]]]] = (
    (
        "policy side, executed FLOPs over the minimum, worst shape",
        "<= 1.05",
        lambda r: _at_most(1.05, max(one["over_minimum"] for one in r["sweep"].values()), "{:.3f}"),
    ),
    ("policy FLOPs, TRL tuned over ours, P:T = 6:1, G = 8", ">= 5x", _flops(5, TUNED)),
    ("policy FLOPs, TRL stock over ours, P:T = 6:1, G = 8", ">= 7.5x", _flops(7.5, STOCK)),
    ("policy CPU s, tuned over ours, P:T = 13:1, G = 8", ">= 8x", _cpu(8, TUNED, "G = 8")),
    ("policy CPU s, stock over ours, P:T = 13:1, G = 8", ">= 10x", _cpu(10, STOCK, "G = 8")),
    ("policy CPU s, tuned over ours, G = 16", ">= 11x", _cpu(11, TUNED, "G = 16")),
    (
        "whole iteration, tuned over ours, the same DiT code and sampler",
        ">= 1.9x",
        _cpu(1.9, TUNED, "G = 8", WHOLE, "{:.2f}x"),
    ),
    ("memory above baseline, ours over tuned, G = 8", "<= 0.55", _memory),
    ("memory per further completion, ours over tuned", "<= 0.2", _memory_growth),
    ("vision tower, source VAE, preprocessing per picture and iteration", "1, 1, 1", _counted_once),
    ("exposed judge wait, on-policy", "<= max(0, L - tail work) + 3 %", _on_policy_wait),
    ("exposed judge wait, one step off, L <= iteration", "<= 2 %", _stale_wait),
    (
        "1 -> 2 ranks: largest relative difference of a metric",
        "<= 1e-6",
        lambda r: _at_most(1e-6, metric_difference(r["ranks"]), "{:.1e}"),
    ),
    ("1 -> 2 ranks: bytes per step over trained bytes", "<= 2.1", _bytes_sent),
)
