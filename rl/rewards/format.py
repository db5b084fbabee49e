"""Reward plugin: 1 if the completion is `<think>...</think><answer>...</answer>`, else 0."""

from __future__ import annotations

import re

from rl.api.plugin import PluginConfig
from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput
from rl.rewards.shared.judging import TagName


class Config(PluginConfig):
    """Names of the two tags."""

    think_tag: TagName = "think"
    """Tag of the block with the thoughts, which comes first."""
    answer_tag: TagName = "answer"
    """Tag of the block with the answer."""


class Format(Reward[Config]):
    """Requires exactly the two blocks, in this order, neither of them empty."""

    needs = frozenset({"text"})

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        text, names = reward_input.text, (self.config.think_tag, self.config.answer_tag)
        if any(text.count(tag) != 1 for name in names for tag in (f"<{name}>", f"</{name}>")):
            return RewardOutput(0.0)
        blocks = r"\s*".join(rf"<{name}>(.*)</{name}>" for name in names)
        match = re.fullmatch(rf"\s*{blocks}\s*", text, re.DOTALL)
        return RewardOutput(float(match is not None and all(map(str.strip, match.groups()))))
