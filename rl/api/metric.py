"""The description of a logged number: its name, its unit, and its meaning in a sentence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One row of the metrics table."""

    unit: str
    """'1' for pure numbers, '0..1' for shares and rewards."""
    meaning: str
    """One sentence, with the denominator of a mean."""
