"""VIEScore (Ku et al. 2023, arXiv 2312.14867) for edits: one judge, two questions per picture.

Semantic consistency, from source and edited picture: was the edit done (`edit_success`), and was
everything else left alone (`over_edit`, 10 = untouched). The arithmetic: `shared/viescore.py`.
"""

from __future__ import annotations

from typing import ClassVar

from rl.api.types import RewardInput, RewardOutput
from rl.rewards.shared import viescore


class Config(viescore.VieScoreConfig):
    """Which words the judge is asked in, and how often. The source picture precedes the question
    about meaning, the edited one follows it."""

    own_semantics: ClassVar[str] = "viescore_semantics.txt"
    type: str = "viescore"
    """This plug."""


class VieScore(viescore.PairedQuestions[Config]):
    """Grades one edit."""

    needs = frozenset({"source", "image"})
    semantic_marks = ("edit_success", "over_edit")

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        """Value in [0, 1], or none when the judge is in trouble."""
        sample = reward_input.sample
        if sample.source is None or reward_input.image is None:
            return RewardOutput(
                None, failure="no_image: viescore needs a source and a rendered picture"
            )
        return await self.ask_about((sample.source,), sample.instruction, reward_input.image)
