"""Combines several rewards into the one number in [0, 1] that GRPO uses."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rl.config.schema import FinalReward


def compose(values: Mapping[str, float | None], final: FinalReward) -> float | None:
    """sum(w x) / sum(w), or prod(x^w)^(1 / sum(w)).

    Args:
        values: `<reward>` -> its value in [0, 1], or None when it could not be graded;
            `<reward>/<part>` -> a part on a 0..1 scale (absent when its reward is None).
        final: the config's `final_reward`; no weights = every reward, weight 1.

    Returns: a number in [0, 1], or None when a reward of weight > 0 could not be graded.
    Raises ValueError for a name that no reward reports, a value outside [0, 1], a negative weight,
    or no positive weight.
    """
    weights = final.weights or {name: 1.0 for name in values if "/" not in name}
    needed = {name: weight for name, weight in weights.items() if weight != 0}
    if not needed or min(needed.values()) < 0:
        raise ValueError(f"final_reward.weights must be >= 0 with one above 0, not {weights}")
    terms: list[tuple[float, float]] = []
    for name, weight in needed.items():
        reward = name.partition("/")[0]
        value = values.get(name)
        if name not in values and values.get(reward, 0.0) is not None:
            raise ValueError(
                f"final_reward.weights names {name!r}, which no reward reports; reported: "
                f"{', '.join(sorted(values)) or 'nothing'}"
            )
        if value is None:
            return None
        if not 0.0 <= value <= 1.0:
            raise ValueError(
                f"final_reward needs values in [0, 1] but {name!r} is {value}: name a part that is "
                "scaled 0..1, or the reward itself"
            )
        terms.append((weight, value))
    total = math.fsum(weight for weight, _ in terms)
    if final.op == "weighted_sum":
        return math.fsum(weight * value for weight, value in terms) / total
    return math.prod(value ** (weight / total) for weight, value in terms)
