"""Checks that equal words earn equal rewards, in whichever arm of a held-out run they stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING

from rl.api.types import Episode, Status
from rl.record.console import warn
from rl.record.untrusted import shown

if TYPE_CHECKING:
    from rl.ranks.dist import Dist

ROUNDING = 0.02
"""Reward (0..1): a model that grades one picture in two batches may round by less."""
MOST_NOISE, MEAN_NOISE = 0.5, 0.2
"""Reward: a judge of temperature 1 that reads two almost equal pictures differs by less in one
pair, and on average."""

Arms = Mapping[str, Episode | None]
"""Of one sample, by name; all under the plain prompt, today's weights and the sample's noise."""


class UnequalRewardsError(RuntimeError):
    """The same words and the same picture have two rewards."""


@dataclass(frozen=True)
class Pair:
    """Equal words in two arms of one sample."""

    sample: str
    arms: tuple[str, str]
    rewards: tuple[float, float]
    same_picture: bool

    @property
    def gap(self) -> float:
        return abs(self.rewards[0] - self.rewards[1])

    def __str__(self) -> str:
        (one, other), (first, second) = self.arms, self.rewards
        picture = "the same picture" if self.same_picture else "another picture"
        return (
            f"held-out sample {self.sample}: {first:.3f} ({one}), {second:.3f} ({other}, {picture})"
        )


def check_equal_words(
    arms_P: Sequence[Arms], images_per_completion: int, at_start: bool, dist: Dist
) -> None:
    """Raise `UnequalRewardsError` on every rank, later than `at_start` warn, where two arms have
    equal words, bit-equal pictures and unequal rewards. Warn where the pictures are not bit-equal
    and rewards differ by more than a judge's noise. Collective."""
    mine = [pair for arms in arms_P for pair in _pairs(arms, images_per_completion)]
    pairs = [pair for of_rank in dist.gather(mine) for pair in of_rank]
    exact = [pair for pair in pairs if pair.same_picture and pair.gap > ROUNDING]
    others = [pair for pair in pairs if not pair.same_picture]
    if exact:
        sentence = (
            f"equal words and equal pictures have unequal rewards in {len(exact)} of {len(pairs)} "
            f"cases ({max(exact, key=_gap)}): scores go to another completion than the one that "
            "was graded, or a reward answers one picture differently each time. Mend the order in "
            "which the judge's or the reward's answers are handed back, or make the reward a "
            "function of its input"
        )
        if at_start:
            raise UnequalRewardsError(sentence)
    elif others and (max(map(_gap, others)) > MOST_NOISE or fmean(map(_gap, others)) > MEAN_NOISE):
        sentence = (
            "equal words have unequal rewards under the same weights and the same noise: "
            f"{fmean(map(_gap, others)):.2f} apart on average of {len(others)} cases "
            f"({max(others, key=_gap)}). Either the renderer is given the states of another "
            "completion, or scores go to another one, or the judge's readings of one picture lie "
            "that far apart"
        )
    else:
        return
    if dist.is_main:
        warn(sentence)


def _gap(pair: Pair) -> float:
    return pair.gap


def _pairs(arms: Arms, images_per_completion: int) -> list[Pair]:
    """Of the arms that were graded by the same rewards."""
    found = []
    for (one, first), (other, second) in combinations(arms.items(), 2):
        if first is None or second is None or first.reward is None or second.reward is None:
            continue
        scored = first.status is Status.SCORED is second.status
        same_words = first.completion.token_ids == second.completion.token_ids
        if not (scored and same_words and first.parts.keys() == second.parts.keys()):
            continue
        # An episode holds the first of its pictures.
        same = images_per_completion == 1 and _bytes(first) == _bytes(second)
        sample = shown(first.prompt.sample.id, 100)
        found.append(Pair(sample, (one, other), (first.reward, second.reward), same))
    return found


def _bytes(episode: Episode) -> tuple[object, ...]:
    image = episode.image
    return () if image is None else (image.mode, image.size, image.tobytes())
