"""Reward plugin: the judge answers a user's own question with the user's own scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Annotated, Literal, Self

from PIL.Image import Image
from pydantic import Field, model_validator

from rl.api.metric import MetricName
from rl.api.plugin import unread
from rl.config.schema import Section
from rl.judge.reply import fill_prompt
from rl.rewards.shared.judging import Asked, JudgedReward, Pictures, RepeatsConfig, numbered

Bound = Annotated[float, Field(ge=-1e6, le=1e6)]
REPLY = (
    "Answer with exactly one JSON object and nothing else. Keep the reasoning under 60 words, "
    "without line breaks or curly braces. After it comes a number for each score, in its range:"
)


class Score(Section):
    """A score that the judge gives."""

    low: Bound = 0.0
    """Worst value."""
    high: Bound = 10.0
    """Best value."""
    weight: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Weight in the mean, under combine 'weighted'."""
    group: str = ""
    """Under combine 'sqrt_min': scores with the same group are joined by their minimum."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} must be below high={self.high:g}")
        return self


class Config(RepeatsConfig):
    """The question, its scores, the pictures that the judge sees, and how often it is asked."""

    own_prompts = {"prompt": None}
    prompt: Annotated[str, Field(min_length=1)]
    """File with the question; the instruction replaces `{instruction}`. A sentence that asks for a
    JSON object with these scores and their ranges is appended to it."""
    scores: dict[MetricName, Score]
    """Name -> range and weight, e.g. `{success: {low: 0, high: 5, weight: 2}, identity: {}}`."""
    combine: Literal["weighted", "min", "sqrt_min"] = "weighted"
    """How scores, each scaled to 0..1, become the reward. weighted: their weighted mean; min: their
    minimum; sqrt_min: square root of the product of two groups' minima (VIEScore)."""
    shows: list[Literal["source", "prompt", "image", "target"]] = ["source", "prompt", "image"]
    """What the judge gets, in this order: source pictures (several are numbered), question, the
    policy's picture, the data's reference edit."""

    @model_validator(mode="after")
    def _can_be_combined(self) -> Self:
        scores, shown = self.scores.values(), set(self.shows)
        if reserved := {"reasoning", "overall"} & self.scores.keys():
            raise ValueError(f"scores.{min(reserved)}: this name is used already; choose another")
        if not any(each.weight for each in scores):
            raise ValueError("scores: give at least one, with a weight, e.g. { success: {} }")
        groups = sorted({each.group for each in scores})
        if self.combine == "sqrt_min" and len(groups) != 2:
            raise ValueError(f"scores: sqrt_min joins two groups, but `group` is {groups} here")
        if not {"prompt", "image"} <= shown or len(shown) < len(self.shows):
            raise ValueError(f"shows: {self.shows}; needs 'prompt' and 'image', each name once")
        return self


class Rubric(JudgedReward[Config]):
    """Grades one picture; part `overall` is the value, the others are the judge's own numbers."""

    needs = frozenset({"image"})
    unit_parts = frozenset({"overall"})

    @classmethod
    def needs_with(cls, config: Config) -> Set[str]:
        return set(config.shows) - {"prompt"}

    @classmethod
    def no_effect(cls, config: Config) -> Iterable[str]:
        for name, score in config.scores.items():
            ignored = {"weighted": "group", "min": "weight group", "sqrt_min": "weight"}
            why = f"combine is {config.combine!r}"
            yield from unread(score, ignored[config.combine], why, f"scores.{name}.")

    def questions(self, instruction: str, pictures: Pictures) -> Sequence[Asked]:
        [prompt] = self.prompts_for(pictures)
        ranges = {name: (score.low, score.high) for name, score in self.config.scores.items()}
        keys = [f'"{name}": <{low:g} to {high:g}>' for name, (low, high) in ranges.items()]
        example = "{" + ", ".join(['"reasoning": "..."', *keys]) + "}"
        shown: dict[str, Sequence[str | Image]] = {
            **pictures,
            "source": numbered(pictures.get("source", ())),
            "prompt": [f"{fill_prompt(prompt, instruction)}\n\n{REPLY}\n{example}"],
        }
        return [self.asked_for(ranges, *(p for name in self.config.shows for p in shown[name]))]

    def reading(self, marks: Sequence[float]) -> Mapping[str, float]:
        scores, combine = self.config.scores, self.config.combine
        units: dict[str, list[float]] = {}
        weighted_sum = 0.0
        for mark, score in zip(marks, scores.values(), strict=True):
            unit = (mark - score.low) / (score.high - score.low)
            units.setdefault(score.group, []).append(unit)
            weighted_sum += score.weight * unit
        minima = [min(group) for group in units.values()]
        if combine == "weighted":
            overall = weighted_sum / sum(score.weight for score in scores.values())
        else:
            overall = min(minima) if combine == "min" else math.prod(minima) ** 0.5
        return {**dict(zip(scores, marks, strict=True)), "overall": min(1.0, overall)}

    def value_of(self, parts: Mapping[str, float]) -> float:
        return parts["overall"]
