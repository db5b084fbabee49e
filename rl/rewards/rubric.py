"""Reward plugin: the judge answers a user's own question with the user's own scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Annotated, Literal, Self

from PIL.Image import Image
from pydantic import Field, model_validator

from rl.api.metric import MetricName
from rl.api.plugin import unread
from rl.config.schema import Section
from rl.judge.question import fill_prompt
from rl.rewards.shared.repeated_judging import (
    Asked,
    JudgedReward,
    Pictures,
    RepeatsConfig,
    numbered,
)

Bound = Annotated[float, Field(ge=-1e6, le=1e6)]
RESERVED = frozenset({"reasoning", "overall"})

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
    prompt: str
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
        if reserved := RESERVED & self.scores.keys():
            raise ValueError(f"scores.{min(reserved)}: this name is used already; choose another")
        if not self.scores:
            raise ValueError("scores: empty; give at least one, e.g. { success: { high: 5 } }")
        if self.combine == "weighted" and not any(each.weight for each in self.scores.values()):
            raise ValueError("scores: all weights are 0; raise one")
        groups = {each.group for each in self.scores.values()}
        if self.combine == "sqrt_min" and len(groups) != 2:
            names = ", ".join(map(repr, sorted(groups)))
            raise ValueError(f"scores: sqrt_min joins two groups, but `group` is {names} here")
        lacking = {"prompt", "image"} - set(self.shows)
        if lacking or len(set(self.shows)) < len(self.shows):
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
            if config.combine != "weighted":
                why = f"combine is {config.combine!r}"
                yield from unread(score, "weight", why, f"scores.{name}.")
            if config.combine != "sqrt_min":
                yield from unread(score, "group", "only sqrt_min has groups", f"scores.{name}.")

    def questions(self, instruction: str, pictures: Pictures) -> Sequence[Asked]:
        [prompt] = self.prompts_for(pictures)
        scores = self.config.scores
        ranges = {name: (score.low, score.high) for name, score in scores.items()}
        keys = [f'"{name}": <{low:g} to {high:g}>' for name, (low, high) in ranges.items()]
        example = "{" + ", ".join(['"reasoning": "..."', *keys]) + "}"
        text = f"{fill_prompt(prompt, instruction)}\n\n{REPLY}\n{example}"
        parts: list[str | Image] = []
        for name in self.config.shows:
            shown = [text] if name == "prompt" else pictures[name]
            parts += numbered(pictures["source"]) if name == "source" else shown
        return [self.asked_for(ranges, *parts)]

    def reading(self, marks: Sequence[float]) -> Mapping[str, float]:
        scores = self.config.scores
        units = [
            (mark - score.low) / (score.high - score.low)
            for mark, score in zip(marks, scores.values(), strict=True)
        ]
        minima: dict[str, float] = {}
        for unit, score in zip(units, scores.values(), strict=True):
            minima[score.group] = min(unit, minima.get(score.group, 1.0))
        overall = min(units)
        if self.config.combine == "sqrt_min":
            first, second = minima.values()
            overall = (first * second) ** 0.5
        elif self.config.combine == "weighted":
            weights = [score.weight for score in scores.values()]
            overall = sum(w * u for w, u in zip(weights, units, strict=True)) / sum(weights)
        return {**dict(zip(scores, marks, strict=True)), "overall": overall}

    def value_of(self, parts: Mapping[str, float]) -> float:
        return parts["overall"]
