"""Reward plugin: the judge scores how well an edit follows the instruction, and its quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field, model_validator

from rl.judge.reply import fill_prompt
from rl.rewards.shared.judging import Asked, JudgedReward, Pictures, RepeatsConfig, numbered

FIELDS = ("alignment", "quality")


class Config(RepeatsConfig):
    """Weights of both scores, the judge's prompt, and how often the judge is asked."""

    own_prompts = {"prompt": "edit_quality.txt"}
    own_prompts_of_several = {"prompt": "edit_quality_of_several.txt"}
    prompt: str = ""
    """File with the question; the instruction replaces `{instruction}`; '' = the built-in one. The
    source picture (several: each after 'Source 1:', ...) precedes the text, the edit follows it."""
    alignment_weight: Annotated[float, Field(ge=0, le=1e6)] = 0.6
    """Weight of following the instruction."""
    quality_weight: Annotated[float, Field(ge=0, le=1e6)] = 0.4
    """Weight of picture quality."""
    n_evals: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Times each picture is graded; the scores are averaged."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 0.7
    """Judge sampling temperature for this reward; null = judge.temperature."""

    @model_validator(mode="after")
    def _one_weight_is_positive(self) -> Config:
        if self.alignment_weight + self.quality_weight == 0:
            raise ValueError("alignment_weight and quality_weight are both 0; raise one")
        return self


class EditQuality(JudgedReward[Config]):
    """Grades one edit: value = (w_a alignment + w_q quality) / (w_a + w_q), both scores 0 to 1."""

    needs = frozenset({"source", "image"})
    unit_parts = frozenset(FIELDS)

    def questions(self, instruction: str, pictures: Pictures) -> Sequence[Asked]:
        text = fill_prompt(self.prompts_for(pictures)[0], instruction)
        sources = numbered(pictures["source"])
        ranges = dict.fromkeys(FIELDS, (0.0, 1.0))
        return [self.asked_for(ranges, *sources, text, *pictures["image"])]

    def reading(self, marks: Sequence[float]) -> Mapping[str, float]:
        return dict(zip(FIELDS, marks, strict=True))

    def value_of(self, parts: Mapping[str, float]) -> float:
        weights = self.config.alignment_weight, self.config.quality_weight
        return (weights[0] * parts["alignment"] + weights[1] * parts["quality"]) / sum(weights)
