"""Is the completion `<think>...</think><answer>...</answer>`, each once and not empty? 1 or 0."""

from __future__ import annotations

import re

from rl.api.plugin import PluginConfig
from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput
from rl.rewards.shared.tags import TagName


class Config(PluginConfig):
    """The two tags."""

    think_tag: TagName = "think"
    """Name of the block with the thoughts, which comes first."""
    answer_tag: TagName = "answer"
    """Name of the block with the answer."""


class Format(Reward[Config]):
    """Reads one completion: the two blocks, in this order, have to be all there is."""

    needs = frozenset({"text"})

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        text, names = reward_input.text, (self.config.think_tag, self.config.answer_tag)
        if any(text.count(tag) != 1 for name in names for tag in (f"<{name}>", f"</{name}>")):
            return RewardOutput(0.0)
        blocks = r"\s*".join(rf"<{name}>(.*)</{name}>" for name in names)
        found = re.fullmatch(rf"\s*{blocks}\s*", text, re.DOTALL)
        return RewardOutput(float(found is not None and all(map(str.strip, found.groups()))))
