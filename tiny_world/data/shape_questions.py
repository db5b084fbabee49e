"""Generates questions about coloured shapes and numbers; the policy does not see the answers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from rl.api.types import Sample
from tiny_world.data.synthetic import SyntheticConfig, SyntheticSource

if TYPE_CHECKING:
    import numpy as np

    from tiny_world.questions import Question


class ShapeQuestions(SyntheticSource[SyntheticConfig]):
    """Sample i depends only on (held_out, seed, i)."""

    name = "shape-questions"
    carries = frozenset({"source", "reference", "hidden:answer"})

    def make(self, index: int) -> Sample:
        from PIL import Image

        from tiny_world import questions

        def make_one(rng: random.Random) -> tuple[tuple[Question, np.ndarray], bytes]:
            question = questions.make_question(rng)
            pixels = questions.draw_array(question.picture)
            return (question, pixels), pixels.tobytes()

        question, pixels = self.draw(index, make_one)
        return Sample(
            id=self.id_of(index),
            instruction=question.text,
            sources=(Image.fromarray(pixels),),
            category=question.kind,
            reference=questions.written(question.thought, question.answer),
            hidden={"answer": question.answer},
        )
