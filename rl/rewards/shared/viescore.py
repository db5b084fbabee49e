"""VIEScore's arithmetic (Ku et al. 2023, arXiv 2312.14867), whatever the task is.

Two questions per picture: semantic consistency (its marks differ from task to task) and perceptual
quality, from the picture alone: `naturalness`, and absence of `artifacts`. SC and PQ are the minima
of their marks, overall = sqrt(SC * PQ), all 0-10; the value is overall / 10.

What not: HTTP, retries (`rl/judge/`), what the semantic question is about (the plugs).
Called by `viescore.py` and `viescore_t2i.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from pydantic import model_validator

from rl.api.judge import Question
from rl.api.plug import Resources
from rl.api.types import RewardOutput
from rl.judge.question import fill_prompt, read_prompt
from rl.judge.reply import read_scores, scores_schema
from rl.rewards.shared.repeated_judging import JudgedReward, RepeatsConfig, mean_grade

if TYPE_CHECKING:
    from PIL import Image

PROMPTS = Path(__file__).parents[1] / "prompts"
PERCEPTION_MARKS = ("naturalness", "artifacts")

Marks = tuple[float, ...]


class VieScoreConfig(RepeatsConfig):
    """Which words the judge is asked in, and how often."""

    own_semantics: ClassVar[str]
    """File in `prompts/` with our question about meaning."""
    perception_prompt: str = ""
    """File with the question about the picture alone, which follows it; '' = ours."""
    semantics_prompt: str = ""
    """File with the question about meaning, `{instruction}` where the user's words go; '' =
    ours."""

    @model_validator(mode="after")
    def _prompts_can_be_read(self) -> VieScoreConfig:
        self.read_prompts()
        return self

    def read_prompts(self) -> tuple[str, str]:
        """(semantics, perception). Raises ValueError naming the key."""
        semantics = Path(self.semantics_prompt or PROMPTS / self.own_semantics)
        perception = Path(self.perception_prompt or PROMPTS / "viescore_perception.txt")
        return (
            read_prompt(semantics, "semantics_prompt", needs_instruction=True),
            read_prompt(perception, "perception_prompt", needs_instruction=False),
        )


VieScoreT = TypeVar("VieScoreT", bound=VieScoreConfig)


class PairedQuestions(JudgedReward[VieScoreT]):
    """Grades one picture with 2 x `n_evals` questions, all at once."""

    unit_parts = frozenset({"sc_01", "pq_01"})
    semantic_marks: ClassVar[tuple[str, ...]]
    """What the semantic question asks for, in order."""

    def __init__(self, config: VieScoreT, resources: Resources) -> None:
        super().__init__(config, resources)
        self._semantics, self._perception = config.read_prompts()

    @classmethod
    def num_questions(cls, config: VieScoreT) -> int:
        """Two a reading."""
        return 2 * config.n_evals

    async def ask_about(
        self, before: Sequence[Image.Image], instruction: str, image: Image.Image
    ) -> RewardOutput:
        """Value in [0, 1]. `before`: pictures that precede the semantic question; `image` follows
        it. A judge in trouble gives a RewardOutput without value, never an exception;
        `JudgeRefused` (a wrong set-up) passes through."""
        semantics = fill_prompt(self._semantics, instruction)
        perception = fill_prompt(self._perception, instruction)
        about_meaning = self._question(self.semantic_marks, *before, semantics, image)
        about_picture = self._question(PERCEPTION_MARKS, perception, image)
        answers = await asyncio.gather(
            *(
                self.judge.ask(question, _reader(marks), repeat)
                for repeat in range(self.config.n_evals)
                for question, marks in (
                    (about_meaning, self.semantic_marks),
                    (about_picture, PERCEPTION_MARKS),
                )
            )
        )
        readings = [
            self._reading(semantic.value, perceptual.value)
            for semantic, perceptual in zip(answers[::2], answers[1::2], strict=True)
            if semantic.value is not None and perceptual.value is not None
        ]
        return mean_grade(answers, readings, lambda parts: parts["overall"] / 10)

    def _question(self, marks: Sequence[str], *parts: str | Image.Image) -> Question:
        return Question(parts, scores_schema(len(marks), 0, 10), self.temperature)

    def _reading(self, semantics: Marks, perception: Marks) -> Mapping[str, float]:
        sc, pq = min(semantics), min(perception)
        return {
            **dict(zip(self.semantic_marks, semantics, strict=True)),
            **dict(zip(PERCEPTION_MARKS, perception, strict=True)),
            "sc": sc,
            "pq": pq,
            "overall": (sc * pq) ** 0.5,
            "sc_01": sc / 10,
            "pq_01": pq / 10,
        }


def _reader(marks: Sequence[str]) -> Callable[[str], Marks]:
    return partial(read_scores, count=len(marks), low=0, high=10)
