"""Metrics of a rank, reduced over all ranks; rewards composed to one number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rl.config.schema import FinalReward

SPREAD_TOLERANCE = 1e-6
"""Rewards (0..1) that differ by no more than this count as equal: the difference is float noise."""

# ---- metrics -------------------------------------------------------------------------------------
# Numbers of an iteration, each with its own denominator, over all ranks.

MetricState = dict[str, list[float | str]]
"""name -> [kind, value, weight], kind in mean | max | sum. Plain data: pickles and JSONs."""


class Metrics:
    """Accumulates named numbers on one rank. A name always has the same kind. None, for what was
    not measured, adds nothing."""

    def __init__(self) -> None:
        self._state: dict[str, tuple[str, float, float]] = {}

    def add(self, name: str, value: float | None, weight: float = 1.0) -> None:
        """Add `value` to the weighted mean of everything under this name, on all ranks.

        Weight 0 adds nothing, whatever the value.
        """
        if weight and value is not None:
            self._fold(name, "mean", value * weight, weight)

    def maximum(self, name: str, value: float | None) -> None:
        """Add `value` to the maximum of everything under this name, on all ranks."""
        if value is not None:
            self._fold(name, "max", value, 1.0)

    def total(self, name: str, value: float) -> None:
        """Add `value` to the sum of everything under this name, on all ranks."""
        self._fold(name, "sum", value, 1.0)

    def update(self, other: Metrics) -> None:
        """Add everything that `other` has accumulated."""
        for name, (kind, value, weight) in other._state.items():
            self._fold(name, kind, value, weight)

    def state(self) -> MetricState:
        """Everything accumulated, as plain data to send to other ranks."""
        return {name: list(entry) for name, entry in self._state.items()}

    @staticmethod
    def merge(states: Sequence[MetricState]) -> dict[str, float]:
        """All ranks' states -> one number per name, in order of first appearance."""
        merged = Metrics()
        for state in states:
            for name, (kind, value, weight) in state.items():
                merged._fold(name, str(kind), float(value), float(weight))
        return {
            name: value / weight if kind == "mean" else value
            for name, (kind, value, weight) in merged._state.items()
        }

    def _fold(self, name: str, kind: str, value: float, weight: float) -> None:
        if name not in self._state:
            self._state[name] = (kind, float(value), float(weight))
            return
        old_kind, old, old_weight = self._state[name]
        assert old_kind == kind, f"metric {name!r} is a {old_kind}, not a {kind}"
        # max() keeps or drops a NaN depending on the order; here it is always kept.
        folded = old + value
        if kind == "max" and folded == folded:
            folded = max(old, value)
        self._state[name] = (kind, folded, old_weight + weight)


# ---- compose -------------------------------------------------------------------------------------
# Combines several rewards into the one number in [0, 1] that GRPO uses.


def compose(values: Mapping[str, float | None], final: FinalReward) -> float | None:
    """sum(w x) / sum(w), or prod(x^w)^(1 / sum(w)).

    Args:
        values: `<reward>` -> its value in [0, 1], or None when it could not be graded;
            `<reward>/<part>` -> a part on a 0..1 scale (absent when its reward is None).
        final: the config's `final_reward`, which `rl check` has approved (weights >= 0, of rewards
            that exist); no weights = every reward, weight 1.

    Returns: a number in [0, 1], or None when a reward of weight > 0 could not be graded.
    """
    weights = final.weights or {name: 1.0 for name in values if "/" not in name}
    terms: list[tuple[float, float]] = []
    for name, weight in weights.items():
        if weight:
            value = values.get(name)
            if value is None:
                return None
            terms.append((weight, value))
    total = math.fsum(weight for weight, _ in terms)
    if final.op == "weighted_sum":
        return math.fsum(weight * value for weight, value in terms) / total
    return math.prod(value ** (weight / total) for weight, value in terms)
