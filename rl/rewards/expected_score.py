"""Reward plugin: expected scores of an edit, from the probabilities of the judge's first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Self

from pydantic import Field, model_validator

from rl.api.judge import Question
from rl.judge.reply import DIGITS, Distribution, expected_minimum, fill_prompt, read_distribution
from rl.rewards.shared.judging import Asked, JudgedReward, Pictures, RepeatsConfig, numbered

ANSWER = "Answer with one digit from 0 (worst) to 9 (best) and nothing else."


class Config(RepeatsConfig):
    """The two questions, and the labels with which the judge answers."""

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
    min_legal_mass: Annotated[float, Field(gt=0, le=1)] = 0.9
    """A reply with less probability on all digits together is unreadable: the judge wanted to write
    something else."""

    @model_validator(mode="after")
    def _asks_once(self) -> Self:
        if self.n_evals > 1 or self.temperature is not None:
            raise ValueError("n_evals, temperature: the probabilities depend on neither; drop them")
        return self


class ExpectedScore(JudgedReward[Config]):
    """Grades one edit: value = E[min(success, restraint)] / best score, with both scores
    independent. `success` and `restraint` are expected scores scaled to 0..1, `..._entropy` their
    entropies in nats, `legal_mass` the smaller probability of both questions' labels."""

    needs = frozenset({"source", "image"})
    unit_parts = frozenset({"success", "restraint", "legal_mass"})
    questions_per_reading = 2

    def questions(self, instruction: str, pictures: Pictures) -> Sequence[Asked]:
        mass = self.config.min_legal_mass
        shown = (*numbered(pictures["source"]), *pictures["image"])
        read = partial(read_distribution, labels=DIGITS, min_legal_mass=mass)
        prompts = self.prompts_for(pictures)
        texts = (f"{fill_prompt(prompt, instruction)}\n\n{ANSWER}" for prompt in prompts)
        return [(Question((*shown, text), {}, labels=DIGITS), read) for text in texts]

    def reading(self, success: Distribution, restraint: Distribution) -> Mapping[str, float]:
        best = len(success.probs) - 1
        return {
            "success": expected_minimum(success) / best,
            "restraint": expected_minimum(restraint) / best,
            "expected_minimum": expected_minimum(success, restraint) / best,
            "success_entropy": success.entropy,
            "restraint_entropy": restraint.entropy,
            "legal_mass": min(success.legal_mass, restraint.legal_mass),
        }

    def value_of(self, parts: Mapping[str, float]) -> float:
        return parts["expected_minimum"]
