"""Calls rewards as the rollout does: one event loop, one client, one episode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image
from tiny_faulty_judge import MODEL, client_of, used

from rl.api.judge import Answer, Question
from rl.api.plugin import Resources
from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput, Sample
from rl.config.schema import JudgeConfig
from rl.judge.reply import UnreadableReplyError
from tiny_world.judge_server import JudgeServer

SOURCES = tuple(Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue"))
RESULT, TARGET = (Image.new("RGB", (8, 8), colour) for colour in ("white", "black"))
EDIT = "put the {dot} of picture 2 into picture 1"


class ScriptedJudge:
    """Gives its replies (or whole answers) in order and then repeats the last one; records the
    questions."""

    config = JudgeConfig()

    def __init__(self, *replies: str | Answer[Any]) -> None:
        self.replies = list(replies)
        self.asked: list[Question] = []
        self.repeats: list[int] = []

    async def ask(
        self, question: Question, parse: Callable[[str], Any], repeat: int = 0
    ) -> Answer[Any]:
        self.asked.append(question)
        self.repeats.append(repeat)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Answer):
            return reply
        try:
            return Answer(parse(reply), (reply,), None, 1, 0.1)
        except UnreadableReplyError as error:
            return Answer(None, (reply,), f"unreadable: {error}", 1, 0.1)


class Ranks(Reward):
    """Asks the judge to compare the pictures of a group."""

    needs_judge = True

    @classmethod
    def num_questions(cls, config: object) -> int:
        return 1

    async def score_group(self, inputs_G: Sequence[RewardInput]) -> list[float]:
        return [0.5 for _ in inputs_G]


def make(plugin: type[Reward[Any]], config: Any, judge: Any = None) -> Any:
    return plugin(config, Resources(judge, "cpu"))


def ask(
    plugin: type[Reward[Any]],
    judge: JudgeServer,
    reward_input: RewardInput,
    config: Any = None,
    **client: Any,
) -> RewardOutput:
    """The grade of one reward that asks `judge`; `config`: the reward's, `client`: the client's."""

    client_config = {"max_attempts": 2, **client}
    assert judge.model == MODEL
    return used(
        client_of(judge.api_base, **client_config),
        lambda client: make(plugin, plugin.Config(**config or {}), client).grade(reward_input),
    )


def grade_of(
    plugin: type[Reward[Any]], text: str, instruction: str = "", **config: Any
) -> RewardOutput:
    """The grade of a completion by a reward without a judge."""
    reward = make(plugin, plugin.Config(**config))
    return asyncio.run(reward.grade(RewardInput(Sample("a", instruction), text, None)))


def grade(
    reward: type[Reward[Any]], judge: ScriptedJudge, num_sources: int = 1, **config: Any
) -> RewardOutput:
    sample = Sample("a", EDIT, sources=SOURCES[:num_sources], target=TARGET)
    plugin = make(reward, reward.Config(**config), judge)
    return asyncio.run(plugin.grade(RewardInput(sample, "a rewriting", RESULT)))
