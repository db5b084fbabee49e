"""One question per picture: does the edit follow the instruction, and is it a good picture?

`alignment` and `quality`, both 0-1, asked together with source and edited picture, several times
with the judge sampling, and averaged: value = (w_a alignment + w_q quality) / (w_a + w_q).

What not: HTTP, retries, reading of replies (`rl/judge/`). Called by the rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from rl.api.judge import Question
from rl.api.plug import Resources
from rl.api.types import RewardInput, RewardOutput
from rl.judge.question import fill_prompt, read_prompt
from rl.judge.reply import fields_schema, read_fields
from rl.rewards.shared.repeated_judging import JudgedReward, RepeatsConfig, mean_grade

PROMPTS = Path(__file__).parent / "prompts"
FIELDS = ("alignment", "quality")

Pair = tuple[float, float]


class Config(RepeatsConfig):
    """Weights, words, and how often the judge is asked: three times, sampling."""

    type: str = "edit_quality"
    """This plug."""
    prompt: str = ""
    """File with the question, `{instruction}` where the user's words go; '' = ours. The source
    picture precedes the text, the edited one follows it."""
    alignment_weight: Annotated[float, Field(ge=0)] = 0.6
    """Weight of following the instruction."""
    quality_weight: Annotated[float, Field(ge=0)] = 0.4
    """Weight of picture quality."""
    n_evals: Annotated[int, Field(ge=1)] = 3
    """As in every judged reward."""
    temperature: Annotated[float, Field(ge=0)] | None = 0.7
    """As in every judged reward; null = judge.temperature."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Config:
        if self.alignment_weight + self.quality_weight == 0:
            raise ValueError("alignment_weight and quality_weight are both 0; raise one")
        self.read_prompt()
        return self

    def read_prompt(self) -> str:
        """Raises ValueError naming the key."""
        path = Path(self.prompt or PROMPTS / "edit_quality.txt")
        return read_prompt(path, "prompt", needs_instruction=True)


class EditQuality(JudgedReward[Config]):
    """Grades one picture with `n_evals` questions, all at once."""

    needs = frozenset({"source", "image"})
    unit_parts = frozenset({"alignment", "quality"})

    def __init__(self, config: Config, resources: Resources) -> None:
        super().__init__(config, resources)
        self._prompt = config.read_prompt()

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        """Value in [0, 1]. A judge in trouble gives a RewardOutput without value, never an
        exception; `JudgeRefused` (a wrong set-up) passes through."""
        sample = reward_input.sample
        if sample.source is None or reward_input.image is None:
            return RewardOutput(
                None, failure="no_image: edit_quality needs a source and a rendering"
            )
        text = fill_prompt(self._prompt, sample.instruction)
        parts = (sample.source, text, reward_input.image)
        question = Question(parts, fields_schema(FIELDS, 0, 1), self.temperature)
        answers = await asyncio.gather(
            *(self.judge.ask(question, _read_pair, n) for n in range(self.config.n_evals))
        )
        readings = [
            dict(zip(FIELDS, answer.value, strict=True))
            for answer in answers
            if answer.value is not None
        ]
        return mean_grade(answers, readings, self._weigh)

    def _weigh(self, parts: Mapping[str, float]) -> float:
        weights = self.config.alignment_weight, self.config.quality_weight
        return (weights[0] * parts["alignment"] + weights[1] * parts["quality"]) / sum(weights)


def _read_pair(text: str) -> Pair:
    alignment, quality = read_fields(text, FIELDS, 0, 1)
    return alignment, quality
