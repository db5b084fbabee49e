"""Checks that equal words earn equal rewards, in whichever arm of a held-out run they stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING

from rl.api.types import Episode, Status
from rl.files.images import digest
from rl.record.console import warn
from rl.record.untrusted import shown

if TYPE_CHECKING:
    from rl.ranks.dist import Dist

ROUNDING = 0.02
"""Reward (0..1): a model that grades one picture in two batches rounds by less."""
MOST_NOISE, MEAN_NOISE = 0.5, 0.2
"""Reward: a judge of temperature 1 that reads two almost equal pictures differs by less in one
pair, and on average."""

Arms = Mapping[str, Episode | None]
"""Of one sample, by name; all under the plain prompt, today's weights and the sample's noise."""


class UnequalRewardsError(RuntimeError):
    """The same words and the same picture have two rewards."""


def check_equal_words(
    arms_P: Sequence[Arms], images_per_completion: int, at_start: bool, dist: Dist
) -> None:
    """Raise `UnequalRewardsError` on every rank, later than `at_start` warn, where two arms have
    equal words, bit-equal pictures and unequal rewards. Warn where the pictures are not bit-equal
    and rewards differ by more than a judge's noise. Collective."""
    mine = [pair for arms in arms_P for pair in _pairs(arms, images_per_completion)]
    pairs = [pair for of_rank in dist.gather(mine) for pair in of_rank]
    exact = [(gap, text) for gap, text, same_picture in pairs if same_picture]
    others = [(gap, text) for gap, text, same_picture in pairs if not same_picture]
    if exact and max(exact)[0] > ROUNDING:
        sentence = (
            f"equal words and equal pictures have unequal rewards: {max(exact)[1]}. Scores go to "
            "another completion than the one that was graded, or a reward answers one picture "
            "differently each time: hand back the answers of judge and rewards in the order in "
            "which they were asked, and make each reward a function of its input"
        )
        if at_start:
            raise UnequalRewardsError(sentence)
    elif others and (max(others)[0] > MOST_NOISE or fmean(gap for gap, _ in others) > MEAN_NOISE):
        sentence = (
            "equal words have unequal rewards under the same weights and the same noise: "
            f"{max(others)[1]}, and {fmean(gap for gap, _ in others):.2f} apart on average of "
            f"{len(others)} pairs. The renderer is given the states of another completion, or "
            "scores go to another one, or the judge's readings of one picture lie that far apart"
        )
    else:
        return
    if dist.is_main:
        warn(sentence)


def _pairs(arms: Arms, images_per_completion: int) -> Iterator[tuple[float, str, bool]]:
    """(distance of their rewards, both in words, whether their pictures are bit-equal) of arms with
    equal words that were graded by the same rewards."""
    scored = [
        (name, arm, arm.reward)
        for name, arm in arms.items()
        if arm is not None and arm.reward is not None and arm.status is Status.SCORED
    ]
    for (one, first, reward), (other, second, other_reward) in combinations(scored, 2):
        same_words = first.completion.token_ids == second.completion.token_ids
        if same_words and first.parts.keys() == second.parts.keys():
            # An episode holds the first of its pictures.
            same_picture = images_per_completion == 1 and _look(first) == _look(second)
            yield (
                abs(reward - other_reward),
                f"held-out sample {shown(first.prompt.sample.id, 100)} earns {reward:.3f} ({one}) "
                f"and {other_reward:.3f} ({other})",
                same_picture,
            )


def _look(episode: Episode) -> bytes:
    return digest(episode.image) if episode.image else b""
