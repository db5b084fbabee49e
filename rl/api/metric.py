"""The description of a logged number: its name, its unit, and its meaning in a sentence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One row of the metrics table. Raises ValueError when a field is not text or is empty."""

    unit: str
    """'1' for pure numbers, '0..1' for shares and rewards."""
    meaning: str
    """One sentence, with the denominator of a mean."""

    def __post_init__(self) -> None:
        for field, text in vars(self).items():
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"a Metric's {field} is {text!r}; expected text")
