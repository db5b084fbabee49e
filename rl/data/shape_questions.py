"""Synthetic questions about coloured shapes and numbers, made on the spot from a seed.

Plug of `rl/data`. What: samples of `rl/tiny_world/questions.py`; the answer is hidden from the
policy. What not: pictures, questions and answers themselves, which are that module's.
"""

from __future__ import annotations

import random
from typing import Annotated, Literal

from pydantic import Field

from rl.config import Section
from rl.types import Sample


class Config(Section):
    """A finite set of questions; another seed gives other pictures, e.g. held-out ones."""

    type: str
    """This plug's name."""
    num_samples: Annotated[int, Field(ge=1)] = 4096
    """Questions in the set."""
    seed: int = 0
    """Which set."""


class ShapeQuestions:
    """`DataSource` whose sample i depends on (seed, i) alone."""

    num_skipped = 0

    def __init__(self, config: Config) -> None:
        self._config = config

    def __len__(self) -> int:
        return self._config.num_samples

    def __getitem__(self, index: int) -> Sample:
        from PIL import Image

        from rl.tiny_world import questions

        if not 0 <= index < len(self):
            raise IndexError(index)
        seed = self._config.seed
        question = questions.make_question(random.Random(f"{seed}:{index}"))
        return Sample(
            id=f"shape-questions-{seed}-{index}",
            instruction=question.text,
            source=Image.fromarray(questions.draw_array(question.picture)),
            category=question.kind,
            reference=questions.written(question.thought, question.answer),
            hidden={"answer": question.answer},
        )


def provides(config: Config) -> frozenset[str]:
    """What samples carry, in the words of a reward's `NEEDS`."""
    return frozenset({"source", "reference", "hidden:answer"})


def count(config: Config) -> int | None:
    """Samples in the set."""
    return config.num_samples


def check(
    config: Config, on_bad_row: Literal["error", "skip"], max_image_side_px: int
) -> list[str]:
    """Nothing can be wrong."""
    return []


def build(
    config: Config, on_bad_row: Literal["error", "skip"], max_image_side_px: int
) -> ShapeQuestions:
    """The set as a `DataSource`."""
    return ShapeQuestions(config)
