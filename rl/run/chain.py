"""Checks that states, pictures and scores belong to their words: equal words must have equal
pictures and equal rewards in all arms of an evaluation, along all paths that draw them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rl.algorithm.metrics import Metrics
from rl.api.types import Episode, Status
from rl.console import warn
from rl.printing import excerpt

if TYPE_CHECKING:
    from PIL.Image import Image

    from rl.ranks.dist import Dist

POLICY, BARE = "the policy", "the user's own words"
"""Names of two arms in messages."""

ROUNDING = 0.02
"""Rounding changes a model's reward (0..1) of one picture in another batch by less than this."""
MOST_NOISE, MEAN_NOISE = 0.5, 0.2
"""A judge at temperature 1 grades two almost equal pictures with rewards that differ by less than
these: in any one pair, and on average."""

ROUNDING_LEVELS = 2.0
"""Rounding moves a picture of equal words and equal noise by less than this, on average over its
pixels (levels of 0..255)."""
MOST_OF_OTHER_WORDS = 1 / 3
"""Two pictures of equal words may differ by this share of what other words change."""

Arms = Mapping[str, Episode | None]
"""A sample's episodes by arm, all with the plain prompt, the current weights and equal noise."""


class _Pair(NamedTuple):
    """Two arms of a sample."""

    arms: str
    equal_words: bool
    gap: float
    """Difference of the rewards, 0..1."""
    levels: float | None
    """Mean difference of the pictures' pixels, 0..255; None if only one is at hand."""
    text: str
    """A message with both rewards."""


class UnequalRewardsError(RuntimeError):
    """Equal words with equal pictures have unequal rewards."""


def check_equal_words(
    metrics: Metrics, arms_P: Sequence[Arms], images_per_completion: int, at_start: bool, dist: Dist
) -> None:
    """Add `eval/equal_words_std`, if any pictures of equal words are not bit-equal, so that the
    judge has graded both, and how far such pictures are apart. If two arms have equal words, equal
    pictures and unequal rewards, warn; `at_start`, and beyond a judge's noise, raise
    `UnequalRewardsError` on every rank. If the pictures are not bit-equal, warn if they differ by
    more than rounding explains, or their rewards by more than a judge's noise. Collective."""
    local_pairs = [pair for arms in arms_P for pair in _pairs(arms)]
    all_pairs = [pair for rank_pairs in dist.gather(local_pairs) for pair in rank_pairs]
    _check_pictures(metrics, all_pairs, dist)
    pairs = [pair for pair in all_pairs if pair.equal_words]
    exact, others = [(0.0, "")], list[tuple[float, str]]()
    for pair in pairs:
        # Whether the same picture was graded. (An episode has only its completion's first.)
        is_exact = pair.levels == 0 and images_per_completion == 1
        (exact if is_exact else others).append((pair.gap, pair.text))
    exact_gap, exact_text = max(exact)
    if others:
        variance = fmean(gap**2 / 2 for gap, _ in others)
        metrics.maximum("eval/equal_words_std", variance**0.5)
    most, mean = max(others, default=(0.0, "")), fmean([gap for gap, _ in others] or [0.0])
    if exact_gap > ROUNDING:
        sentence = (
            f"equal words and equal pictures have unequal rewards: {exact_text}. Scores are "
            "assigned to another completion than the graded one, or a reward grades one picture "
            "differently each time: make judge and rewards reply in the order of their inputs, and "
            "make each reward a function of its input"
        )
        if at_start and exact_gap > MOST_NOISE:
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


def _check_pictures(metrics: Metrics, pairs: Sequence[_Pair], dist: Dist) -> None:
    """Add how far the pictures of equal words and of other words are apart; warn if the former
    differ by more than rounding, and by a large share of the latter."""
    levels_of: dict[str, list[float]] = {}
    other_words = list[float]()
    for pair in pairs:
        if pair.levels is not None:
            levels = levels_of.setdefault(pair.arms, []) if pair.equal_words else other_words
            levels.append(pair.levels)
    if not levels_of:
        return
    most, arms = max((fmean(levels), arms) for arms, levels in levels_of.items())
    metrics.maximum("eval/equal_words_levels", most)
    limit = ROUNDING_LEVELS
    if other_words:
        metrics.maximum("eval/other_words_levels", fmean(other_words))
        limit = max(limit, MOST_OF_OTHER_WORDS * fmean(other_words))
    if most > limit and dist.is_main:
        warn(
            "equal words have different pictures under the same weights and the same noise: "
            f"{most:.1f} of 255 levels apart on average of {len(levels_of[arms])} pairs ({arms}; "
            f"the limit is {limit:.1f}). Along one of these paths the renderer gets the states, "
            "the sources or the noise of another completion, or its pictures are handed out in "
            "another order; or rounding changes pictures as much as words do"
        )


def _pairs(arms: Arms) -> Iterator[_Pair]:
    """Each pair of graded arms with the same reward parts that have equal words, or are the policy
    and the bare arm."""
    scored = [
        (name, arm, arm.reward)
        for name, arm in arms.items()
        if arm is not None and arm.reward is not None and arm.status is Status.SCORED
    ]
    for (one, first, reward), (other, second, other_reward) in combinations(scored, 2):
        equal_words = first.completion.token_ids == second.completion.token_ids
        if first.parts.keys() != second.parts.keys():
            continue
        if equal_words or {one, other} == {POLICY, BARE}:
            yield _Pair(
                f"{one} and {other}",
                equal_words,
                abs(reward - other_reward),
                _levels_apart(first.image, second.image),
                f"held-out sample {excerpt(first.prompt.sample.id, 100)} earns {reward:.3f} ({one})"
                f" and {other_reward:.3f} ({other})",
            )


def _levels_apart(first: Image | None, second: Image | None) -> float | None:
    """Mean absolute difference of the pixels, 0..255; 255 for pictures of unequal sizes; 0 without
    pictures, None with only one."""
    if first is None or second is None:
        return 0.0 if first is second else None
    if first.size != second.size:
        return 255.0
    one, other = (np.asarray(image.convert("RGB"), dtype=np.int16) for image in (first, second))
    return float(np.abs(one - other).mean())
