"""The interface of rewards: functions of a picture, or `Reward` classes (example: docs/plugins.md).

Axes in names: `_G` completions of a group.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import replace
from functools import wraps
from numbers import Real
from typing import Any, ClassVar, TypeVar

from rl.api.plugin import ConfigT, Count, ModelRunner, Resources, brief
from rl.api.types import RewardInput, RewardOutput, Sample
from rl.config.schema import MetricName, usable_name

Score = RewardOutput | float | None
"""A bare number is a value without parts; None: this picture could not be graded."""


class Reward(ModelRunner[ConfigT]):
    """A plugin of `rl/rewards`: it grades an episode in [0, 1].

    Implement `grade` or, for a reward that compares pictures, `score_group`.
    """

    needs: ClassVar[Set[str]] = frozenset()
    """What each sample must have: 'source', 'image' (a rendered picture), 'target', 'text',
    'reference', or names of keys in `Sample.hidden`. A run whose data lacks one is refused."""
    needs_judge: ClassVar[bool] = False
    """Whether it asks the judge; `num_questions` then states how often."""
    diagnostic: ClassVar[bool] = False
    """True keeps it out of the final reward unless `final_reward.weights` names it."""
    unit_parts: ClassVar[Set[MetricName]] = frozenset()
    """Parts that every graded output has, each in 0..1; `final_reward.weights` may name them as
    `<reward>/<part>`."""

    reads_thoughts: ClassVar[bool] = True
    """False: it ignores thoughts, so completions with the same words, and hence one picture, are
    graded once."""

    def __init__(self, config: ConfigT, resources: Resources) -> None:
        """Once per rank, before the first iteration. Raises ValueError for user errors."""
        self.config = config

    @classmethod
    def needs_with(cls, config: ConfigT) -> Set[str]:
        """`needs`, where they depend on the config."""
        return cls.needs

    @classmethod
    def num_questions(cls, config: ConfigT) -> Count:
        """Requests to the judge per picture, at least 1 when it `needs_judge`."""
        return 0

    @classmethod
    def check_sample(cls, config: ConfigT, sample: Sample) -> None:
        """Raises UnusableSampleError, with the remedy, for a row that the reward could never grade.
        Called for each row before a model is loaded, without its pictures, if the reward counts in
        the final reward."""

    def grade(self, reward_input: RewardInput) -> Score | Awaitable[Score]:
        """Grade one picture (or text, if nothing renders). `async def`, or a plain `def`, which is
        run in threads, several pictures at a time. If no grade can be given, return None or a
        `RewardOutput` without a value, never a zero; an exception leaves the episode UNGRADED."""
        raise NotImplementedError

    def score_group(
        self, inputs_G: Sequence[RewardInput]
    ) -> Sequence[Score] | Awaitable[Sequence[Score]]:
        """Grade a group's pictures together, one score per input in the same order; replaces
        `grade`. `inputs_G`: one prompt's rendered completions under the same noise, without
        duplicates, and last the bare variant if there is one."""
        raise NotImplementedError

    @classmethod
    def scores_groups(cls) -> bool:
        """Whether it grades whole groups (`score_group`)."""
        return cls.score_group is not Reward.score_group


FunctionT = TypeVar("FunctionT", bound=Callable[[RewardInput], Score | Awaitable[Score]])


def reward(
    needs: Set[str] = frozenset(), diagnostic: bool = False, unit_parts: Set[str] = frozenset()
) -> Callable[[FunctionT], FunctionT]:
    """`@reward(needs={'image'})` declares for a function what a `Reward` declares by class
    variables. A function that declares nothing needs no decorator."""

    def declare(function: FunctionT) -> FunctionT:
        variables = {"needs": needs, "diagnostic": diagnostic, "unit_parts": unit_parts}
        function.reward_variables = variables  # type: ignore[attr-defined]
        return function

    return declare


def class_of(function: Any) -> type[Reward]:
    """A `Reward` class without config keys that calls a function of one picture."""

    def grade(reward: Reward, reward_input: RewardInput) -> Score | Awaitable[Score]:
        score: Score | Awaitable[Score] = function(reward_input)
        return score

    members = {"__module__": function.__module__, "grade": wraps(function)(grade)}
    members |= getattr(function, "reward_variables", {})
    return type(function.__name__, (Reward,), members)


NO_VALUE = "gave no value (None)"


def checked_output(score: object, unit_parts: Set[str] = frozenset()) -> RewardOutput:
    """Convert a reward's return value to a valid `RewardOutput`. Raises TypeError or ValueError."""
    output = score if isinstance(score, RewardOutput) else RewardOutput(score)  # type: ignore[arg-type]
    if output.value is None:
        return replace(output, failure=output.failure or NO_VALUE)
    value = _number("value", output.value)
    if not 0 <= value <= 1:
        raise ValueError(f"value {value} is outside [0, 1]; scale or clip it")
    parts = {
        usable_name(name): _number(f"part {name!r}", part) for name, part in output.parts.items()
    }
    for name in sorted(unit_parts):
        if name not in parts or not 0 <= parts[name] <= 1:
            reported = parts.get(name, "nothing")
            raise ValueError(f"part {name!r} is declared in unit_parts (0..1), found {reported}")
    return replace(output, value=value, parts=parts)


def _number(label: str, value: object) -> float:
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    expected = "a finite number, alone or as RewardOutput(value, parts)"
    raise TypeError(f"{label} is {brief(value)}; expected {expected}")
