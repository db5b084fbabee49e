"""Reward plugin: expected scores of an edit, from the probabilities of the judge's first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from rl.api.judge import Question
from rl.judge.labels import LABELS, Distribution, expected_minimum, read_distribution
from rl.judge.question import fill_prompt
from rl.rewards.shared.repeated_judging import Asked, AskedReward, Pictures, PromptsConfig, numbered

ANSWERS = {
    "digits": "one digit from 0 (worst) to 9 (best)",
    "letters": "one capital letter from A (worst) to K (best)",
}


class Config(PromptsConfig):
    """The two questions, and the labels with which the judge answers. The judge needs no
    temperature and no repeats: one answer has the probabilities of all labels."""

    own_prompts = {
        "success_prompt": "expected_success.txt",
        "restraint_prompt": "expected_restraint.txt",
    }
    success_prompt: str = ""
    """File with the question how well the instruction is followed, with `{instruction}`; '' = the
    built-in one. The sources and then the edit precede it. A sentence that asks for one label is
    appended."""
    restraint_prompt: str = ""
    """The same for what the instruction does not touch."""
    labels: Literal["digits", "letters"] = "digits"
    """digits: 0 to 9; letters: A to K, which is 0 to 10. Each must be one token of the judge."""
    min_legal_mass: Annotated[float, Field(gt=0, le=1)] = 0.9
    """A reply with less probability on all labels together is unreadable: the judge wanted to write
    something else."""


class ExpectedScore(AskedReward[Config]):
    """Grades one edit: value = E[min(success, restraint)] / best score, with both scores
    independent. `success` and `restraint` are expected scores scaled to 0..1, `..._entropy` their
    entropies in nats, `legal_mass` the smaller probability of both questions' labels."""

    needs = frozenset({"source", "image"})
    unit_parts = frozenset({"success", "restraint", "legal_mass"})
    questions_per_reading = 2

    def questions(self, instruction: str, pictures: Pictures) -> Sequence[Asked]:
        labels = LABELS[self.config.labels]
        shown = (*numbered(pictures["source"]), *pictures["image"])
        read = partial(read_distribution, labels=labels, min_legal_mass=self.config.min_legal_mass)
        texts = (fill_prompt(prompt, instruction) for prompt in self.prompts_for(pictures))
        answer = f"\n\nAnswer with {ANSWERS[self.config.labels]} and nothing else."
        return [(Question((*shown, text + answer), {}, labels=labels), read) for text in texts]

    def reading(self, success: Distribution, restraint: Distribution) -> Mapping[str, float]:
        best = len(success.probs) - 1
        return {
            "success": success.mean / best,
            "restraint": restraint.mean / best,
            "expected_minimum": expected_minimum([success, restraint]) / best,
            "success_entropy": success.entropy,
            "restraint_entropy": restraint.entropy,
            "legal_mass": min(success.legal_mass, restraint.legal_mass),
        }

    def value_of(self, parts: Mapping[str, float]) -> float:
        return parts["expected_minimum"]
