"""Checks that equal words have equal rewards in all arms of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING

from rl.algorithm.metrics import Metrics
from rl.api.types import Episode, Status
from rl.console.console import warn
from rl.files.images import digest
from rl.text.untrusted import excerpt

if TYPE_CHECKING:
    from rl.ranks.dist import Dist

ROUNDING = 0.02
"""Rounding changes a model's reward (0..1) of one picture in another batch by less than this."""
MOST_NOISE, MEAN_NOISE = 0.5, 0.2
"""A judge at temperature 1 grades two almost equal pictures with rewards that differ by less than
these: in any one pair, and on average."""

Arms = Mapping[str, Episode | None]
"""A sample's episodes by arm, all with the plain prompt, the current weights and equal noise."""


class UnequalRewardsError(RuntimeError):
    """Equal words with equal pictures have unequal rewards."""


def check_equal_words(
    metrics: Metrics, arms_P: Sequence[Arms], images_per_completion: int, at_start: bool, dist: Dist
) -> None:
    """Add `eval/equal_words_std`, if any pictures of equal words are not bit-equal, so that the
    judge has graded both. If two arms have equal words, equal pictures and unequal rewards, raise
    `UnequalRewardsError` on every rank `at_start`, and warn later. If the pictures are not
    bit-equal, warn if the rewards differ by more than a judge's noise. Collective."""
    local_pairs = [pair for arms in arms_P for pair in _pairs(arms, images_per_completion)]
    pairs = [pair for rank_pairs in dist.gather(local_pairs) for pair in rank_pairs]
    exact = max(((gap, text) for gap, text, same in pairs if same), default=(0.0, ""))
    others = [(gap, text) for gap, text, same in pairs if not same]
    if others:
        variance = fmean(gap**2 / 2 for gap, _ in others)
        metrics.maximum("eval/equal_words_std", variance**0.5)
    most, mean = max(others, default=(0.0, "")), fmean([gap for gap, _ in others] or [0.0])
    if exact[0] > ROUNDING:
        sentence = (
            f"equal words and equal pictures have unequal rewards: {exact[1]}. Scores are assigned "
            "to another completion than the graded one, or a reward grades one picture differently "
            "each time: make judge and rewards reply in the order of their inputs, and make each "
            "reward a function of its input"
        )
        if at_start:
            raise UnequalRewardsError(sentence)
    elif most[0] > MOST_NOISE or mean > MEAN_NOISE:
        sentence = (
            "equal words have unequal rewards under the same weights and the same noise: "
            f"{most[1]}, and {mean:.2f} apart on average of {len(others)} pairs. The renderer gets "
            "the states of another completion, or scores are assigned to another one, or the "
            "judge's scores of one picture differ by that much"
        )
    else:
        return
    if dist.is_main:
        warn(sentence)


def _pairs(arms: Arms, images_per_completion: int) -> Iterator[tuple[float, str, bool]]:
    """(difference of the rewards, a message with both, whether the pictures are bit-equal) for each
    pair of arms with equal words and the same reward parts."""
    scored = [
        (name, arm, arm.reward)
        for name, arm in arms.items()
        if arm is not None and arm.reward is not None and arm.status is Status.SCORED
    ]
    for (one, first, reward), (other, second, other_reward) in combinations(scored, 2):
        same_words = first.completion.token_ids == second.completion.token_ids
        if same_words and first.parts.keys() == second.parts.keys():
            # An episode has only the first of its completion's pictures.
            digests = [digest(arm.image) if arm.image else b"" for arm in (first, second)]
            yield (
                abs(reward - other_reward),
                f"held-out sample {excerpt(first.prompt.sample.id, 100)} earns {reward:.3f} ({one})"
                f" and {other_reward:.3f} ({other})",
                images_per_completion == 1 and digests[0] == digests[1],
            )
