"""A run that goes on and cannot learn says so, once, when that begins.

What: counted rewards that are constant, groups without spread, iterations without an optimiser
step. What not: groups that fail as a whole (`watch.py`), pictures that fail (`lost_pictures.py`).
Nothing here stops a run: each of these may pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from rl.algorithm.metrics import Metrics
from rl.config.schema import RunConfig

if TYPE_CHECKING:
    from rl.ranks.dist import Dist
    from rl.rollout.stream import Rollout

SEVERAL = 3
"""Iterations in a row."""
TREND = 10
"""Iterations over which a share is averaged that is never quite 1."""
HIGH_SHARE = 0.9
"""Of groups without spread, on that average."""
FEWEST_VALUES = 8
"""Of a reward: fewer that are equal may be chance."""
ROUNDING = 1e-6
"""Of a reward, 0..1: values no further apart are one value."""
HALF = 0.5
"""Distinct completions / completions of a group, on average: below it most are copies."""
FULL_MARKS = 0.99
"""Of a reward, 0..1, on average."""


@dataclass(frozen=True)
class Range:
    """Of a reward's values in one iteration."""

    lowest: float
    highest: float
    num_values: int


class NoLearning:
    """Watches every iteration of a run."""

    def __init__(self, config: RunConfig) -> None:
        """`config`: resolved, so that its weights name what counts."""
        weights = config.final_reward.weights or dict.fromkeys(config.rewards, 1.0)
        self._counted = [name for name, weight in weights.items() if weight]
        self._constant = ConstantRewards()
        self._no_spread = NoSpread()
        self._no_steps = NoSteps()
        self._ranges: Mapping[str, Range] = {}

    def add_rewards(self, rollout: Rollout, dist: Dist) -> Metrics:
        """`reward/range/<name>` of each reward, or part of one, that counts. Collective."""
        arms = [episode for episodes_G in rollout.episodes for episode in episodes_G]
        arms += [bare for bare in rollout.bare_episodes if bare is not None]
        mine: dict[str, Range] = {}
        for name in self._counted:
            values = [episode.parts[name] for episode in arms if name in episode.parts]
            if values:
                mine[name] = Range(min(values), max(values), len(values))
        self._ranges = _over_ranks(dist.gather(mine))
        metrics = Metrics()
        for name, found in self._ranges.items():
            metrics.maximum(f"reward/range/{name}", found.highest - found.lowest)
        return metrics

    def sentences(self, metrics: Mapping[str, float], is_last: bool) -> Iterator[str]:
        """What has just begun, in a trained iteration of these metrics. `is_last`: no other
        follows."""
        if "optimizer/steps" not in metrics:  # measured before training
            return
        yield from self._constant.add(self._ranges)
        for sentence in (self._no_spread.add(metrics), self._no_steps.add(metrics, is_last)):
            if sentence is not None:
                yield sentence


def _over_ranks(ranks: list[dict[str, Range]]) -> dict[str, Range]:
    """In the order of the names' first appearance."""
    merged: dict[str, Range] = {}
    for found in ranks:
        for name, own in found.items():
            other = merged.get(name, own)
            num_values = own.num_values + (other.num_values if name in merged else 0)
            lowest, highest = min(own.lowest, other.lowest), max(own.highest, other.highest)
            merged[name] = Range(lowest, highest, num_values)
    return merged


class ConstantRewards:
    """Rewards that give every picture the same. Says so once, and again after it was better."""

    def __init__(self) -> None:
        self._last: dict[str, deque[Range]] = {}
        self._said: set[str] = set()

    def add(self, ranges: Mapping[str, Range]) -> Iterator[str]:
        """A sentence for each that has now been constant over `SEVERAL` iterations. One that graded
        nothing says nothing."""
        for name, found in ranges.items():
            last = self._last.setdefault(name, deque(maxlen=SEVERAL))
            last.append(found)
            highest = max(each.highest for each in last)
            is_constant = highest - min(each.lowest for each in last) <= ROUNDING
            num_values = sum(each.num_values for each in last)
            if not is_constant:
                self._said.discard(name)
            elif len(last) == SEVERAL and num_values >= FEWEST_VALUES and name not in self._said:
                self._said.add(name)
                yield (
                    f"rewards.{name}: {highest:.4g} for each of the {num_values} completions of "
                    f"the last {SEVERAL} iterations, so that it prefers none of them and teaches "
                    "nothing: a judge that does not look (read its replies in episodes/; is "
                    "judge.model the right one, does it see the pictures, does a cache answer for "
                    "it?), a reward that is written wrongly, or a task that is solved, or far too "
                    f"hard (reward/range/{name})"
                )


class NoSpread:
    """Groups whose rewards are all equal. Says so once, and again after it was better."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=TREND)
        self._said = False

    def add(self, metrics: Mapping[str, float]) -> str | None:
        """A sentence when no group has had any for `SEVERAL` iterations, or hardly one on the
        average of `TREND`."""
        if "groups/zero_spread" not in metrics:
            return None
        self._shares.append(metrics["groups/zero_spread"])
        last = list(self._shares)[-SEVERAL:]
        none_lately = len(last) == SEVERAL and min(last) == 1
        hardly_any = len(self._shares) == TREND and fmean(self._shares) >= HIGH_SHARE
        lasts = none_lately or hardly_any
        begins, self._said = lasts and not self._said, lasts
        if not begins:
            return None
        num, share = (SEVERAL, 1.0) if none_lately else (TREND, fmean(self._shares))
        return (
            f"{share:.0%} of the groups of the last {num} iterations have no spread: all rewards "
            "of a group are equal, and the policy gradient learns nothing from them: "
            f"{_why_no_spread(metrics)} (groups/zero_spread)"
        )


def _why_no_spread(metrics: Mapping[str, float]) -> str:
    """The likeliest reason, with its remedy."""
    if metrics.get("status/policy_failed") == 1:
        return "no completion could be used; the causes are in episodes/"
    if metrics.get("status/ungraded") == 1:
        return "no picture was graded; the causes are in episodes/"
    if metrics.get("groups/distinct_completions", 1) < HALF:
        return (
            "most completions of a group are the same words; raise sampling.temperature, or go "
            "back to a checkpoint before the policy fell in with itself"
        )
    if metrics.get("reward/mean", 0) >= FULL_MARKS:
        return "they all earn full marks; take harder data, or stop here"
    return (
        "the rewards do not tell completions of one prompt apart; look at them in episodes/, take "
        "a finer or another reward, or easier data where all fail"
    )


class NoSteps:
    """Iterations that left the weights as they were. Says so once, again after it was better, and
    at the end of a run that took no step at all."""

    def __init__(self) -> None:
        self._num_in_row = 0
        self._num_seen = 0
        self._num_moved = 0

    def add(self, metrics: Mapping[str, float], is_last: bool) -> str | None:
        """A step whose gradient is exactly 0 is none."""
        moved = metrics["optimizer/steps"] > 0 and metrics.get("optimizer/grad_norm") != 0
        self._num_seen += 1
        self._num_moved += moved
        self._num_in_row = 0 if moved else self._num_in_row + 1
        if is_last and not self._num_moved:
            return (
                f"the run ends without an optimiser step: none of the {self._num_seen} iterations "
                "since it was started moved the weights, and the model saved is the one that was "
                f"loaded; in the last {_why_no_step(metrics)}"
            )
        if self._num_in_row != SEVERAL:
            return None
        return (
            f"no optimiser step in the last {SEVERAL} iterations (optimizer/steps): the weights "
            f"stand still; {_why_no_step(metrics)}"
        )


def _why_no_step(metrics: Mapping[str, float]) -> str:
    if metrics.get("optimizer/skipped_steps"):
        return (
            "the gradient was not finite and was left out (optimizer/skipped_steps); look for a "
            "NaN in the losses of metrics.jsonl, lower optimizer.learning_rate, or load other "
            "weights"
        )
    if metrics.get("status/ungraded") == 1:
        return "nothing was graded; the causes are in episodes/"
    if metrics.get("groups/zero_spread") == 1:
        return "all rewards of each group were equal, and nothing else is minimised"
    if metrics["optimizer/steps"] > 0:
        return "the gradient was exactly 0; is what the loss reads of the policy still trainable?"
    return "no token carried a loss; look at tokens/trained and at the policy's loss mask"
