"""The reward of the fault campaign's runs: the judge's score of a completion."""

from __future__ import annotations

from rl.api.judge import Question
from rl.api.plugin import PluginConfig, Resources
from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput
from rl.judge.reply import read_scores, scores_schema

Config = PluginConfig


class JudgeScore(Reward):
    """Asks the judge one question per completion."""

    needs = frozenset({"text"})
    needs_judge = True

    def __init__(self, config: PluginConfig, resources: Resources) -> None:
        super().__init__(config, resources)
        assert resources.judge is not None, "this reward needs a judge"
        self._judge = resources.judge

    @classmethod
    def num_questions(cls, config: PluginConfig) -> int:
        return 1

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        text = f"{reward_input.sample.instruction} Answer: {reward_input.words!r}"
        question = Question((text,), scores_schema(1, 10))
        answer = await self._judge.ask(question, lambda text: read_scores(text, 1, 0, 10)[0])
        value = None if answer.value is None else answer.value / 10
        return RewardOutput(
            value, replies=answer.replies, failure=answer.failure, seconds=answer.seconds
        )
