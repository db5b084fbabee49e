"""Synthetic questions about coloured shapes and numbers, made on the spot from a seed.

Data plug. What: samples of `tiny_world/questions.py`; the answer is hidden from the
policy. What not: pictures, questions and answers themselves, which are that module's.
"""

from __future__ import annotations

import random

from rl.api.types import Sample
from tiny_world.data.synthetic import MadeConfig, MadeSource


class Config(MadeConfig):
    """A finite set of questions; another seed gives other pictures, e.g. held-out ones."""


class ShapeQuestions(MadeSource[Config]):
    """Sample i depends on (seed, i) alone."""

    def make(self, index: int) -> Sample:
        from PIL import Image

        from tiny_world import questions

        seed = self.config.seed
        question = questions.make_question(random.Random(f"{seed}:{index}"))
        return Sample(
            id=f"shape-questions-{seed}-{index}",
            instruction=question.text,
            sources=(Image.fromarray(questions.draw_array(question.picture)),),
            category=question.kind,
            reference=questions.written(question.thought, question.answer),
            hidden={"answer": question.answer},
        )

    @classmethod
    def provides(cls, config: Config) -> frozenset[str]:
        """What samples carry, in the words of a reward's `needs`."""
        return frozenset({"source", "reference", "hidden:answer"})
