"""What a logged number is: its unit, and its meaning in a sentence.

What: `Metric`. What not: the metrics that every run has (`rl/run/metric_table.py`), how a plug
declares and reports its own (`plug.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One row of the metrics table. Raises ValueError when a word is missing."""

    unit: str
    """'1' for pure numbers, '0..1' for shares and rewards."""
    meaning: str
    """One sentence, with the denominator of a mean."""

    def __post_init__(self) -> None:
        for field, words in vars(self).items():
            if not isinstance(words, str) or not words.strip():
                raise ValueError(f"a Metric's {field} is {words!r}; expected words")
