"""How near an edit comes to the reference edit, by the judge's eye (after EARL's GroundScore).

The judge sees the reference (`Sample.target`) and the policy's picture; neither the source nor the
instruction. `score` is 0-10, the value a tenth of it. `sqrt(viescore_pq x ground_score)` is
`final_reward: { op: 'geometric_mean', weights: { 'viescore/pq_01': 1, ground_score: 1 } }`.

What not: HTTP, retries, reading of replies (`rl/judge/`). Called by the rollout.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from pydantic import model_validator

from rl.api.judge import Question
from rl.api.plug import Resources
from rl.api.types import RewardInput, RewardOutput
from rl.judge.question import read_prompt
from rl.judge.reply import fields_schema, read_fields
from rl.rewards.shared.repeated_judging import JudgedReward, RepeatsConfig, mean_grade

PROMPTS = Path(__file__).parent / "prompts"
FIELDS = ("score",)


class Config(RepeatsConfig):
    """Which words the judge is asked in, and how often."""

    type: str = "ground_score"
    """This plug."""
    prompt: str = ""
    """File with the question; '' = ours. The reference precedes the text, the policy's picture
    follows it."""

    @model_validator(mode="after")
    def _prompt_can_be_read(self) -> Config:
        self.read_prompt()
        return self

    def read_prompt(self) -> str:
        """Raises ValueError naming the key."""
        path = Path(self.prompt or PROMPTS / "ground_score.txt")
        return read_prompt(path, "prompt", needs_instruction=False)


class GroundScore(JudgedReward[Config]):
    """Grades one picture with `n_evals` questions, all at once."""

    needs = frozenset({"target", "image"})

    def __init__(self, config: Config, resources: Resources) -> None:
        super().__init__(config, resources)
        self._prompt = config.read_prompt()

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        """Value in [0, 1]. A judge in trouble gives a RewardOutput without value, never an
        exception; `JudgeRefused` (a wrong set-up) passes through."""
        target = reward_input.sample.target
        if target is None or reward_input.image is None:
            return RewardOutput(
                None, failure="no_image: ground_score needs a reference and a rendering"
            )
        parts = (target, self._prompt, reward_input.image)
        question = Question(parts, fields_schema(FIELDS, 0, 10), self.temperature)
        answers = await asyncio.gather(
            *(self.judge.ask(question, _read_score, n) for n in range(self.config.n_evals))
        )
        readings = [{"score": answer.value} for answer in answers if answer.value is not None]
        return mean_grade(answers, readings, lambda parts: parts["score"] / 10)


def _read_score(text: str) -> float:
    (score,) = read_fields(text, FIELDS, 0, 10)
    return score
