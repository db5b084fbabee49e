"""How evenly the ranks share the time of an iteration: which is the slowest, and in what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median


def rank_times(seconds_by_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`time/<phase>_max_over_median`, the same of the whole `iteration`, and `time/slowest_rank`;
    {} with one rank.

    `seconds_by_rank`: seconds of each phase in rank order, without waits for other ranks.
    """
    if len(seconds_by_rank) == 1:
        return {}
    phases = dict.fromkeys(phase for seconds in seconds_by_rank for phase in seconds)
    columns = {phase: [of_rank.get(phase, 0.0) for of_rank in seconds_by_rank] for phase in phases}
    columns["iteration"] = whole = [sum(of_rank.values()) for of_rank in seconds_by_rank]
    metrics = {
        f"time/{phase}_max_over_median": max(seconds) / middle
        for phase, seconds in columns.items()
        if (middle := median(seconds)) > 0
    }
    return {**metrics, "time/slowest_rank": float(whole.index(max(whole)))}
