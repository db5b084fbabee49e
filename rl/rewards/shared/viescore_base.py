"""Base class of the VIEScore rewards (Ku et al. 2023, arXiv 2312.14867)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, TypeVar

from PIL.Image import Image

from rl.api.judge import Question
from rl.judge.question import fill_prompt
from rl.judge.reply import read_scores, scores_schema
from rl.rewards.shared.repeated_judging import (
    Asked,
    JudgedReward,
    Pictures,
    RepeatsConfig,
    numbered,
)

PERCEPTION_MARKS = ("naturalness", "artifacts")
PERCEPTION = {"perception_prompt": "viescore_perception.txt"}

Marks = tuple[float, ...]


class VieScoreConfig(RepeatsConfig):
    """The judge's prompts, and how often each question is asked."""

    perception_prompt: str = ""
    """File with the question about the picture alone (picture sent last); '' = the built-in one."""
    semantics_prompt: str = ""
    """File with the question about meaning, with `{instruction}`; '' = the built-in one."""


VieScoreT = TypeVar("VieScoreT", bound=VieScoreConfig)


class PairedQuestions(JudgedReward[VieScoreT]):
    """Asks two questions per picture: semantic consistency (SC), whose scores depend on the task,
    and perceptual quality (PQ) of the picture alone: `naturalness`, and absence of `artifacts`. SC
    and PQ are the minima of their scores, overall = sqrt(SC * PQ), all 0-10; value = overall / 10.
    """

    unit_parts = frozenset({"sc_01", "pq_01"})
    questions_per_reading = 2
    semantic_marks: ClassVar[tuple[str, ...]]
    """Names of the scores that the semantic question asks for, in order."""

    def questions(self, instruction: str, pictures: Pictures) -> Sequence[Asked]:
        prompts = self.prompts_for(pictures)
        semantics, perception = (fill_prompt(prompt, instruction) for prompt in prompts)
        sources = numbered(pictures["source"]) if "source" in self.needs else []
        return [
            self._asked(self.semantic_marks, *sources, semantics, *pictures["image"]),
            self._asked(PERCEPTION_MARKS, perception, *pictures["image"]),
        ]

    def _asked(self, marks: Sequence[str], *parts: str | Image) -> Asked:
        question = Question(parts, scores_schema(len(marks), 0, 10), self.temperature)
        return question, partial(read_scores, count=len(marks), low=0, high=10)

    def reading(self, semantics: Marks, perception: Marks) -> Mapping[str, float]:
        sc, pq, overall = self.joined(semantics, perception)
        return {
            **dict(zip(self.semantic_marks, semantics, strict=True)),
            **dict(zip(PERCEPTION_MARKS, perception, strict=True)),
            "sc": sc,
            "pq": pq,
            "overall": overall,
            "sc_01": sc / 10,
            "pq_01": pq / 10,
        }

    def joined(self, semantics: Marks, perception: Marks) -> tuple[float, float, float]:
        """(SC, PQ, overall), each 0-10, from the scores of both questions."""
        sc, pq = min(semantics), min(perception)
        return sc, pq, (sc * pq) ** 0.5

    def value_of(self, parts: Mapping[str, float]) -> float:
        return parts["overall"] / 10
