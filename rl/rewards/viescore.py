"""VIEScore (Ku et al. 2023, arXiv 2312.14867) for edits: one judge, two questions per picture.

Semantic consistency, from source and edited picture: was the edit done (`edit_success`), and was
everything else left alone (`over_edit`, 10 = untouched). Perceptual quality, from the edited
picture alone. The arithmetic is in `shared/viescore.py`; the value is overall / 10.

Called by the rollout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rl.api.types import RewardInput, RewardOutput
from rl.rewards.shared import viescore

if TYPE_CHECKING:
    from rl.judge.client import JudgeClient

NEEDS = frozenset({"source", "image"})
NEEDS_JUDGE = True
UNIT_PARTS = viescore.UNIT_PARTS
"""Parts scaled 0..1, which `final_reward.weights` may name as `<reward>/<part>`."""

SEMANTIC_MARKS = ("edit_success", "over_edit")


class Config(viescore.VieScoreConfig):
    """Which words the judge is asked in, and how often. The source picture precedes the question
    about meaning, the edited one follows it."""

    own_semantics: ClassVar[str] = "viescore_semantics.txt"
    type: str = "viescore"
    """This plug."""


def num_questions(config: Config) -> int:
    """Requests to the judge per picture."""
    return config.num_questions()


class VieScore:
    """Grades one edit."""

    def __init__(self, config: Config, judge: JudgeClient) -> None:
        self._questions = viescore.PairedQuestions(config, judge, SEMANTIC_MARKS)

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        """Value in [0, 1], or none when the judge is in trouble."""
        sample = reward_input.sample
        if sample.source is None or reward_input.image is None:
            return RewardOutput(
                None, failure="no_image: viescore needs a source and a rendered picture"
            )
        return await self._questions.grade((sample.source,), sample.instruction, reward_input.image)


def build(config: Config, judge: JudgeClient, device: str) -> VieScore:
    """The reward. Raises ValueError when the repeats make no sense at the judge's temperature."""
    return VieScore(config, judge)
