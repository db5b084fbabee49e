"""The alarms on a run's page, a sentence each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rl.report.curves import points
from rl.report.reading import Record, is_control
from rl.report.summary import CONTROL

_NOT_GRADED = 0.01
_TAUGHT_NOTHING = 0.5
"""Shares above which there is an alarm."""
_MAX_NAMED = 8


def alarms(
    metrics: Sequence[Record], config: Mapping[str, Any], damaged: Mapping[str, int]
) -> list[str]:
    """`damaged`: file -> lines of it that cannot be read."""
    sentences = [CONTROL] if is_control(config) else []
    if alarmed := [str(row["iteration"]) for row in metrics if row.get("drift/alarm")]:
        sentences.append(
            f"Drift: after {_named(alarmed)} iterations words that training does not change had "
            "lost more than noise."
        )
    for name, what in (
        ("status/ungraded", "of the episodes were not graded (renderer or judge)"),
        ("eval/ungraded", "of the held-out episodes were not graded"),
        ("status/policy_failed", "of the completions could not be used"),
    ):
        shares = [value for _, value in points(metrics, name)]
        recent = fmean(shares[-10:]) if shares else 0.0
        if shares and max(fmean(shares), recent) > _NOT_GRADED:
            lately = f", {recent:.1%} in the last 10" if len(shares) > 10 else ""
            sentences.append(f"{fmean(shares):.1%} {what}{lately}; {max(shares):.1%} at worst.")
    for name, what in (
        ("groups/dead", "are dead: all rewards equal and below 0.5"),
        ("groups/zero_spread", "have no spread of rewards, and teach nothing"),
    ):
        shares = [value for _, value in points(metrics, name)]
        if shares and (recent := fmean(shares[-10:])) > _TAUGHT_NOTHING:
            last = "last 10 iterations" if len(shares) > 10 else "run"
            sentences.append(f"{recent:.0%} of the groups of the {last} {what}.")
    skipped = sum(value for _, value in points(metrics, "optimizer/skipped_steps"))
    if skipped:
        sentences.append(f"{skipped:g} optimiser steps were skipped for a non-finite gradient.")
    if damaged:
        files = [f"{file} ({count})" for file, count in damaged.items()]
        sentences.append(f"Damaged lines are left out: {_named(files)}.")
    return sentences


def _named(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
