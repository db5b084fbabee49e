"""Compares the gain in the final reward with that in rewards which train nothing (`held_out_only`):
where the policy exploits its judge, such a reward stays behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rl.algorithm.metrics import Metrics
from rl.api.types import Status
from rl.console import warn
from rl.files import read_rows
from rl.printing import excerpt
from rl.run.paired import Paired, paired

Rewards = tuple[float, float]
"""One sample's final reward, and its reward by the plugin that trains nothing; 0..1 each."""
LEAST_GAP = 0.05
"""Smallest gap (0..1) worth an alarm. If the second reward reaches its highest marks before the
final reward does, even a sound policy makes a small gap."""
FEWEST = 8
"""Fewer samples cannot relate one reward to the other."""
MAX_CAUSE_CHARS = 300


def slope_of(pairs_S: Sequence[Rewards]) -> tuple[float, float, float | None]:
    """(least-squares slope of the second reward on the final one, its standard error, their
    correlation). A negative slope counts as 0; (0, 0, None) for fewer than `FEWEST` samples, or if
    either reward is the same for all."""
    if len(pairs_S) < FEWEST:
        return 0.0, 0.0, None
    x, y = (values - values.mean() for values in np.array(pairs_S).T)
    if min(x @ x, y @ y) < 1e-12:
        return 0.0, 0.0, None
    slope, correlation = float(x @ y / (x @ x)), float(x @ y / np.sqrt((x @ x) * (y @ y)))
    error = float(np.sqrt(((y - slope * x) ** 2).sum() / (len(x) - 2) / (x @ x)))
    return (slope, error, correlation) if slope > 0 else (0.0, 0.0, correlation)


def gap_of(
    first: Mapping[str, Rewards], now: Mapping[str, Rewards], hashes: Mapping[str, Sequence[str]]
) -> tuple[Paired, float] | None:
    """(mean over samples of slope x (gain in the final reward) - (gain in the second one), mean
    gain in the final reward), over the samples that both evaluations have; None without any.

    `slope_of` the first evaluation translates between the scales, and its error is added. A slope
    is too small by the final reward's unreliability, so noise of either reward makes no gap.
    """
    slope, slope_error, _ = slope_of(list(first.values()))
    ids = [key for key in now if key in first]
    gains = [(now[key][0] - first[key][0], now[key][1] - first[key][1]) for key in ids]
    behind = paired([slope * one - two for one, two in gains], [hashes[key] for key in ids])
    if behind is None:
        return None
    gain = float(np.mean([one for one, _ in gains]))
    if behind.error is not None:
        error = (behind.error**2 + (slope_error * gain) ** 2) ** 0.5
        behind = replace(behind, error=error)
    return behind, gain


def add_gaps(
    metrics: Metrics, names: Iterable[str], folder: Path, records_S: Sequence[Mapping[str, Any]]
) -> None:
    """Add `eval/gap/<name>` and its companions for each reward in `names`; warn of gaps beyond
    noise, and of pictures that the reward did not grade. `records_S`: the records of the
    evaluation in `folder` (`<run>/evaluation/it_000010`); the first ones are read from beside it.
    """
    for name in names:
        drawn = [record for record in records_S if record["status"] == Status.SCORED.value]
        now = _pairs(drawn, name)
        failures = [record["failure"] for record in drawn if record["id"] not in now]
        metrics.add(f"eval/ungraded/{name}", 1.0, weight=len(failures))
        metrics.add(f"eval/ungraded/{name}", 0.0, weight=len(now))
        if failures:
            warn(
                f"{name} did not grade {len(failures)} of {len(drawn)} held-out pictures; training "
                f"goes on. First cause: {excerpt(str(failures[0]), MAX_CAUSE_CHARS)}"
            )
        correlation = slope_of(list(now.values()))[2]
        if correlation is not None:
            metrics.maximum(f"eval/correlation/{name}", correlation)
        hashes = {record["id"]: record["shown"] for record in drawn}
        result = gap_of(_first_pairs(folder, name) or now, now, hashes)
        if result is not None:
            _add_gap(metrics, name, folder, *result)


def _add_gap(metrics: Metrics, name: str, folder: Path, gap: Paired, gain: float) -> None:
    is_alarming = gap.is_alarming and gap.mean > LEAST_GAP and gain >= 0
    metrics.maximum(f"eval/gap/{name}", gap.mean)
    if gap.error is not None:
        metrics.maximum(f"eval/gap_error/{name}", gap.error)
    metrics.maximum(f"eval/gap_alarm/{name}", float(is_alarming))
    if is_alarming:
        warn(
            f"evaluation {folder.name}: the held-out reward rose by {gain:+.3f}, and {name}, which "
            f"trains nothing, stays {gap.mean:.3f} +- {gap.error:.3f} behind what that predicts "
            f"({gap.num} samples): the policy may exploit its judge. Compare both rewards on the "
            "page's held-out samples"
        )


def _pairs(records: Iterable[Mapping[str, Any]], name: str) -> dict[str, Rewards]:
    """Sample id -> its rewards, where both are known."""
    return {
        record["id"]: (record["reward"], record["parts"][name])
        for record in records
        if record["status"] == Status.SCORED.value and name in record["parts"]
    }


def _first_pairs(folder: Path, name: str) -> dict[str, Rewards]:
    """The rewards of the first evaluation before that in `folder` which `name` graded."""
    for path in sorted(folder.parent.glob("it_*/records.jsonl")):
        if path.parent.name < folder.name and (pairs := _pairs(read_rows(path)[0], name)):
            return pairs
    return {}
