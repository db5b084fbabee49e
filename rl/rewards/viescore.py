"""VIEScore (Ku et al. 2023, arXiv 2312.14867) for edits: one judge, two questions per picture.

Semantic consistency, from source and edited picture: was the edit done (`edit_success`), and was
everything else left alone (`over_edit`, 10 = untouched). Perceptual quality, from the edited
picture alone: `naturalness`, and absence of `artifacts`. SC and PQ are the minimum of their two,
overall = sqrt(SC * PQ), all 0-10; the value is overall / 10.

What not: HTTP, retries, reading of replies (`rl/system/judge_*.py`). Called by the rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from rl.config import Section
from rl.system.judge_question import Question, fill_prompt, read_prompt, repeat_temperature
from rl.system.judge_reply import read_scores, scores_schema
from rl.types import Evidence, Grade

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from rl.system.judge_client import Answer, JudgeClient

NEEDS = frozenset({"source", "image"})
NEEDS_JUDGE = True
UNIT_PARTS = frozenset({"sc_01", "pq_01"})
"""Parts scaled 0..1, which `final_reward.weights` may name as `<reward>/<part>`."""

PROMPTS = Path(__file__).parent / "prompts"

Pair = tuple[float, float]


class Config(Section):
    """Which words the judge is asked in, and how often."""

    type: str = "viescore"
    """This plug."""
    semantics_prompt: str = ""
    """File with the question about source and edited picture, `{instruction}` where the user's
    words go; '' = ours. The source picture precedes the text, the edited one follows it."""
    perception_prompt: str = ""
    """File with the question about the edited picture, which follows it; '' = ours."""
    n_evals: Annotated[int, Field(ge=1)] = 1
    """Times each picture is graded; the readings that could be had are averaged."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """Judge sampling temperature for this reward; null = judge.temperature."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Config:
        if self.temperature is not None:
            repeat_temperature(self.n_evals, self.temperature)
        self.read_prompts()
        return self

    def read_prompts(self) -> tuple[str, str]:
        """(semantics, perception). Raises ValueError naming the key."""
        semantics = Path(self.semantics_prompt or PROMPTS / "viescore_semantics.txt")
        perception = Path(self.perception_prompt or PROMPTS / "viescore_perception.txt")
        return (
            read_prompt(semantics, "semantics_prompt", needs_instruction=True),
            read_prompt(perception, "perception_prompt", needs_instruction=False),
        )


def num_questions(config: Config) -> int:
    """Requests to the judge per picture."""
    return 2 * config.n_evals


class VieScore:
    """Grades one picture with 2 x `n_evals` questions, all at once."""

    def __init__(self, config: Config, judge: JudgeClient) -> None:
        self._judge = judge
        self._semantics, self._perception = config.read_prompts()
        self._num_evals = config.n_evals
        temperature = config.temperature
        self._temperature = repeat_temperature(
            config.n_evals, judge.config.temperature if temperature is None else temperature
        )

    async def grade(self, evidence: Evidence) -> Grade:
        """Value in [0, 1]. A judge in trouble gives a Grade without value, never an exception;
        `JudgeRefused` (a wrong set-up) passes through."""
        sample = evidence.sample
        if sample.source is None or evidence.image is None:
            return Grade(None, failure="no_image: viescore needs a source and a rendered picture")
        semantics = fill_prompt(self._semantics, sample.instruction)
        perception = fill_prompt(self._perception, sample.instruction)
        about_both = self._question(sample.source, semantics, evidence.image)
        about_edited = self._question(perception, evidence.image)
        answers = await asyncio.gather(
            *(
                self._judge.ask(question, _read_pair, repeat)
                for repeat in range(self._num_evals)
                for question in (about_both, about_edited)
            )
        )
        return _combine(answers)

    def _question(self, *parts: str | Image.Image) -> Question:
        return Question(parts, scores_schema(2, 0, 10), self._temperature)


def _read_pair(text: str) -> Pair:
    first, second = read_scores(text, 2, 0, 10)
    return first, second


def _combine(answers: Sequence[Answer[Pair]]) -> Grade:
    """Answers in the order SC, PQ, SC, PQ, ...; a repeat counts when both could be had."""
    pairs = zip(answers[::2], answers[1::2], strict=True)
    readings = [
        _parts(sc.value, pq.value)
        for sc, pq in pairs
        if sc.value is not None and pq.value is not None
    ]
    replies = tuple(reply for answer in answers for reply in answer.replies)
    seconds = max(answer.seconds for answer in answers)
    if not readings:
        failure = next(answer.failure for answer in answers if answer.failure)
        return Grade(None, replies=replies, failure=failure, seconds=seconds)
    parts = {name: fmean(reading[name] for reading in readings) for name in readings[0]}
    return Grade(parts["overall"] / 10, parts, replies, seconds=seconds)


def _parts(semantics: Pair, perception: Pair) -> Mapping[str, float]:
    sc, pq = min(semantics), min(perception)
    return {
        "edit_success": semantics[0],
        "over_edit": semantics[1],
        "naturalness": perception[0],
        "artifacts": perception[1],
        "sc": sc,
        "pq": pq,
        "overall": (sc * pq) ** 0.5,
        "sc_01": sc / 10,
        "pq_01": pq / 10,
    }


def build(config: Config, judge: JudgeClient, device: torch.device) -> VieScore:
    """The reward. Raises ValueError when the repeats make no sense at the judge's temperature."""
    return VieScore(config, judge)
