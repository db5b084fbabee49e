"""Questions about coloured shapes and numbers: samples of `tiny_world/questions.py`, made on the
spot from a seed; the answer is hidden from the policy.
"""

from __future__ import annotations

import random

from rl.api.types import Sample
from tiny_world.data.synthetic import MadeConfig, MadeSource


class ShapeQuestions(MadeSource[MadeConfig]):
    """Sample i depends on (seed, i) alone."""

    carries = frozenset({"source", "reference", "hidden:answer"})

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
