"""VIEScore (Ku et al. 2023, arXiv 2312.14867) for pictures made from a text alone.

Semantic consistency, from the user's ORIGINAL prompt and the picture: is what was asked for in it
(`prompt_following`). Perceptual quality, from the picture alone. The arithmetic is in
`shared/viescore.py`; the value is overall / 10.

Called by the rollout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rl.api.types import RewardInput, RewardOutput
from rl.rewards.shared import viescore

if TYPE_CHECKING:
    from rl.judge.client import JudgeClient

NEEDS = frozenset({"image"})
NEEDS_JUDGE = True
UNIT_PARTS = viescore.UNIT_PARTS
"""Parts scaled 0..1, which `final_reward.weights` may name as `<reward>/<part>`."""

SEMANTIC_MARKS = ("prompt_following",)


class Config(viescore.VieScoreConfig):
    """Which words the judge is asked in, and how often. The picture follows either question."""

    own_semantics: ClassVar[str] = "viescore_t2i_semantics.txt"
    type: str = "viescore_t2i"
    """This plug."""


def num_questions(config: Config) -> int:
    """Requests to the judge per picture."""
    return config.num_questions()


class VieScoreT2I:
    """Grades one picture against the words it was asked for with."""

    def __init__(self, config: Config, judge: JudgeClient) -> None:
        self._questions = viescore.PairedQuestions(config, judge, SEMANTIC_MARKS)

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        """Value in [0, 1], or none when the judge is in trouble."""
        if reward_input.image is None:
            return RewardOutput(None, failure="no_image: viescore_t2i needs a rendered picture")
        return await self._questions.grade((), reward_input.sample.instruction, reward_input.image)


def build(config: Config, judge: JudgeClient, device: str) -> VieScoreT2I:
    """The reward. Raises ValueError when the repeats make no sense at the judge's temperature."""
    return VieScoreT2I(config, judge)
