"""Does the completion have the asked form: `<think>...</think><answer>...</answer>`, whole?

1 when it does, else 0. White space may stand around the blocks; each tag occurs exactly once, and
neither block is empty. What not: whether the answer is right (`accuracy/plug.py`).

Called by the rollout.
"""

from __future__ import annotations

from rl.api.plug import Resources
from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput
from rl.config.schema import Section
from rl.rewards.shared.tags import TagName, last_block


class Config(Section):
    """The two tags."""

    type: str = "format"
    """This plug."""
    think_tag: TagName = "think"
    """Name of the block with the thoughts, which comes first."""
    answer_tag: TagName = "answer"
    """Name of the block with the answer."""


class Format(Reward[Config]):
    """Reads one completion."""

    needs = frozenset({"text"})

    def __init__(self, config: Config, resources: Resources) -> None:
        super().__init__(config, resources)
        self._names = (config.think_tag, config.answer_tag)

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        """1 or 0; always graded."""
        return RewardOutput(float(is_well_formed(reward_input.text, *self._names)))


def is_well_formed(text: str, think_tag: str, answer_tag: str) -> bool:
    """Whether the two blocks, in this order, are all there is."""
    names = (think_tag, answer_tag)
    blocks = [last_block(text, name) for name in names]
    if not all(block is not None and block.strip() for block in blocks):
        return False
    tags = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]
    if any(text.count(tag) != 1 for tag in tags):
        return False
    whole = [f"<{name}>{block}</{name}>" for name, block in zip(names, blocks, strict=True)]
    head, _, rest = text.partition(whole[0])
    between, _, tail = rest.partition(whole[1])
    return rest.rstrip().endswith(whole[1]) and not f"{head}{between}{tail}".strip()
