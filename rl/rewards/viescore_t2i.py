"""VIEScore (Ku et al. 2023, arXiv 2312.14867) for pictures made from a text alone.

Semantic consistency, from the user's ORIGINAL prompt and the picture: is what was asked for in it
(`prompt_following`). The arithmetic: `shared/viescore.py`.
"""

from __future__ import annotations

from typing import ClassVar

from rl.api.types import RewardInput, RewardOutput
from rl.rewards.shared import viescore


class Config(viescore.VieScoreConfig):
    """Which words the judge is asked in, and how often. The picture follows either question."""

    own_semantics: ClassVar[str] = "viescore_t2i_semantics.txt"
    type: str = "viescore_t2i"
    """This plug."""


class VieScoreT2I(viescore.PairedQuestions[Config]):
    """Grades one picture against the words it was asked for with."""

    needs = frozenset({"image"})
    semantic_marks = ("prompt_following",)

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        """Value in [0, 1], or none when the judge is in trouble."""
        if reward_input.image is None:
            return RewardOutput(None, failure="no_image: viescore_t2i needs a rendered picture")
        return await self.ask_about((), reward_input.sample.instruction, reward_input.image)
