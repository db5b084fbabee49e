"""Checks that equal words and equal pictures earn equal rewards in all arms of a held-out run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from rl.api.types import Episode, Status
from rl.console.console import warn
from rl.files.images import digest
from rl.text.untrusted import shown

if TYPE_CHECKING:
    from rl.ranks.dist import Dist

ROUNDING = 0.02
"""Reward (0..1): a model that grades one picture in two batches rounds by less."""

Arms = Mapping[str, Episode | None]
"""Of one sample, by name; all under the plain prompt, today's weights and the sample's noise."""


class UnequalRewardsError(RuntimeError):
    """The same words and the same picture have two rewards."""


def check_equal_words(arms_P: Sequence[Arms], at_start: bool, dist: Dist) -> None:
    """Raise `UnequalRewardsError` on every rank, later than `at_start` warn, where two arms have
    equal words, bit-equal pictures and unequal rewards. Collective."""
    local = [pair for arms in arms_P for pair in _pairs(arms)]
    gap, pair = max((pair for of_rank in dist.gather(local) for pair in of_rank), default=(0.0, ""))
    if gap <= ROUNDING:
        return
    sentence = (
        f"equal words and equal pictures have unequal rewards: {pair}. Scores are assigned to "
        "another completion than the graded one, or a reward answers one picture differently each "
        "time: return the answers of judge and rewards in the order of the questions, and make "
        "each reward a function of its input"
    )
    if at_start:
        raise UnequalRewardsError(sentence)
    if dist.is_main:
        warn(sentence)


def _pairs(arms: Arms) -> Iterator[tuple[float, str]]:
    """(distance of the rewards, both as text) of arms with equal words, an equal picture and the
    same kinds of rewards."""
    scored = [
        (name, arm, arm.reward)
        for name, arm in arms.items()
        if arm is not None and arm.reward is not None and arm.status is Status.SCORED
    ]
    for (one, first, reward), (other, second, other_reward) in combinations(scored, 2):
        same_words = first.completion.token_ids == second.completion.token_ids
        looks = [digest(arm.image) if arm.image else b"" for arm in (first, second)]
        if same_words and looks[0] == looks[1] and first.parts.keys() == second.parts.keys():
            yield (
                abs(reward - other_reward),
                f"held-out sample {shown(first.prompt.sample.id, 100)} earns {reward:.3f} ({one}) "
                f"and {other_reward:.3f} ({other})",
            )
