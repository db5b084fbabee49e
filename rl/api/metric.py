"""The description of a logged number: its name, its unit, and its meaning in a sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator


def usable_name(name: object) -> str:
    """`name`; ValueError if it cannot be part of a metric name `reward/part/<reward>/<part>`."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ValueError("not usable in a metric name; use letters, digits, '_', '.', '-'")
    return name


MetricName = Annotated[str, AfterValidator(usable_name)]


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
