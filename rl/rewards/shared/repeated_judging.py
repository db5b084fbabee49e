"""What rewards that ask the judge share: how often each picture is graded, and the mean of it.

What: two config keys, `JudgedReward`, the folding of answers into one `RewardOutput`. What not: the
questions (the plugs), HTTP and the reading of replies (`rl/judge/`). Called by the judged rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Annotated, Any, TypeVar

from pydantic import Field, model_validator

from rl.api.judge import Answer
from rl.api.plug import Resources
from rl.api.reward import Reward
from rl.api.types import RewardOutput
from rl.config.schema import RunConfig, Section
from rl.judge.question import repeat_temperature


class RepeatsConfig(Section):
    """How often the judge is asked."""

    n_evals: Annotated[int, Field(ge=1)] = 1
    """Times each picture is graded; the readings that could be had are averaged."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """Judge sampling temperature for this reward; null = judge.temperature."""

    @model_validator(mode="after")
    def _repeats_make_sense(self) -> RepeatsConfig:
        if self.temperature is not None:
            repeat_temperature(self.n_evals, self.temperature)
        return self

    def temperature_with(self, judge_temperature: float) -> float:
        """The temperature to ask at. Raises ValueError when it makes all repeats the same."""
        own = self.temperature
        return repeat_temperature(self.n_evals, judge_temperature if own is None else own)


RepeatsT = TypeVar("RepeatsT", bound=RepeatsConfig)


class JudgedReward(Reward[RepeatsT]):
    """Asks the judge `n_evals` times about each picture."""

    needs_judge = True

    def __init__(self, config: RepeatsT, resources: Resources) -> None:
        """Raises ValueError when the repeats make no sense at the judge's temperature."""
        super().__init__(config, resources)
        assert resources.judge is not None, "it needs one"
        self.judge = resources.judge
        self.temperature = config.temperature_with(self.judge.config.temperature)

    @classmethod
    def num_questions(cls, config: RepeatsT) -> int:
        """One a reading."""
        return config.n_evals

    @classmethod
    def problems(cls, config: RepeatsT, run: RunConfig) -> Iterable[str]:
        """Repeats that the judge answers all alike."""
        try:
            config.temperature_with(run.judge.temperature)
        except ValueError as error:
            yield f"n_evals: {error}"


def mean_grade(
    answers: Sequence[Answer[Any]],
    readings: Sequence[Mapping[str, float]],
    value_of: Callable[[Mapping[str, float]], float],
) -> RewardOutput:
    """The mean of each part over the readings, and `value_of` these means, in [0, 1].

    `answers`: all that were asked for; none of them readable is a RewardOutput without a value.
    """
    replies = tuple(reply for answer in answers for reply in answer.replies)
    seconds = max(answer.seconds for answer in answers)
    if not readings:
        failure = next(answer.failure for answer in answers if answer.failure)
        return RewardOutput(None, replies=replies, failure=failure, seconds=seconds)
    parts = {name: fmean(reading[name] for reading in readings) for name in readings[0]}
    return RewardOutput(value_of(parts), parts, replies, seconds=seconds)
