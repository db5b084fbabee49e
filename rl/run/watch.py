"""Conditions over several iterations that a run reports once, when they begin. None stops it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from rl.algorithm.grpo import SPREAD_TOLERANCE
from rl.algorithm.metrics import Metrics
from rl.config.schema import RunConfig

if TYPE_CHECKING:
    from rl.ranks.dist import Dist
    from rl.rollout.stream import Rollout

SEVERAL = 3
"""Iterations in a row."""
TREND = 10
"""Iterations that a share is averaged over: one is a handful of groups."""
DEAD_SHARE = 0.25
"""Of the groups, on that average."""
HIGH_SHARE = 0.9
"""Of groups without spread, on that average."""
FEWEST_VALUES = 8
"""Of a reward: fewer that are equal may be chance."""
HALF = 0.5
"""Distinct completions / completions of a group, on average: below it most are copies."""
FULL_MARKS = 0.99
"""Of a reward, 0..1, on average."""
MISMATCH_LIMITS = {"float32": (1e-5, 0.999), "float16": (1e-4, 0.99), "bfloat16": (1e-3, 0.95)}
"""Engine dtype -> (largest `mismatch/k3`, nats; smallest `mismatch/ess`) of two sound forwards.

Sound tiny runs reach 1e-10 in float32 and 6e-5 in bfloat16; log-probs that differ by 0.025 on
average, as of a bfloat16 7B, give 5e-4. TF32 in a GPU's attention stays below the float32 limit."""
MISMATCH_GROWTH = 10
"""Times the run's first k3, which is rounding alone where the adapter is still 0: the limit where
that is lower, down to a tenth of the one above."""


@dataclass(frozen=True)
class Range:
    """Of a reward's values in one iteration."""

    lowest: float
    highest: float
    num_values: int


@dataclass(frozen=True)
class Trained:
    """One trained iteration."""

    metrics: Mapping[str, float]
    ranges: Mapping[str, Range]
    """Of each reward, or part of one, that counts."""


Rule = Callable[[Sequence[Trained]], Mapping[str, str]]
"""The last iterations, oldest first, `TREND` at most -> condition that holds -> its sentence."""


class Watch:
    """Shown every iteration of a run; reports a condition once, and again after it was gone."""

    def __init__(self, config: RunConfig, engine_dtype: str, lora_dropout: float) -> None:
        """`config`: resolved, so that its weights name what counts."""
        weights = config.final_reward.weights or dict.fromkeys(config.rewards, 1.0)
        self._counted = [name for name, weight in weights.items() if weight]
        self._ranges: Mapping[str, Range] = {}
        self._last: deque[Trained] = deque(maxlen=TREND)
        self._holding: set[str] = set()
        self._num_seen = self._num_moved = 0
        self._first_k3: float | None = None
        self._rules: list[Rule] = [constant_rewards, dead_groups, no_spread, no_steps]
        cuts = config.sampling.top_p < 1 or config.sampling.top_k > 0
        if not (config.max_staleness or cuts or lora_dropout):
            self._rules.append(lambda last: mismatch(last, engine_dtype, self._first_k3))

    def add_rewards(self, rollout: Rollout, dist: Dist) -> Metrics:
        """`reward/range/<name>` of each reward, or part of one, that counts. Collective."""
        arms = [episode for episodes_G in rollout.episodes for episode in episodes_G]
        arms += [bare for bare in rollout.bare_episodes if bare is not None]
        mine: dict[str, Range] = {}
        for name in self._counted:
            values = [episode.parts[name] for episode in arms if name in episode.parts]
            if values:
                mine[name] = Range(min(values), max(values), len(values))
        ranks = dist.gather(mine)
        names = dict.fromkeys(name for found in ranks for name in found)
        self._ranges = {
            name: _joined([found[name] for found in ranks if name in found]) for name in names
        }
        metrics = Metrics()
        for name, found in self._ranges.items():
            metrics.maximum(f"reward/range/{name}", found.highest - found.lowest)
        return metrics

    def sentences(self, metrics: Mapping[str, float], is_last: bool) -> Iterator[str]:
        """Of each condition that has just begun, in an iteration of these metrics. `is_last`: no
        other follows."""
        if "optimizer/steps" not in metrics:  # measured before training
            return
        self._last.append(Trained(metrics, self._ranges))
        if self._first_k3 is None:
            self._first_k3 = metrics.get("mismatch/k3")
        self._num_seen += 1
        self._num_moved += _moved(metrics)
        found: dict[str, str] = {}
        for rule in self._rules:
            found.update(rule(tuple(self._last)))
        begun = found.keys() - self._holding
        self._holding = set(found)
        yield from (sentence for condition, sentence in found.items() if condition in begun)
        if is_last and not self._num_moved:
            yield (
                f"the run ends without an optimiser step: none of the {self._num_seen} iterations "
                "since it was started moved the weights, and the model saved is the one that was "
                f"loaded; in the last {_why_no_step(metrics)}"
            )


def _joined(found: Sequence[Range]) -> Range:
    return Range(
        min(each.lowest for each in found),
        max(each.highest for each in found),
        sum(each.num_values for each in found),
    )


def _values(last: Sequence[Trained], name: str) -> list[float]:
    return [each.metrics[name] for each in last if name in each.metrics]


def constant_rewards(last: Sequence[Trained]) -> Mapping[str, str]:
    """Rewards that give every picture the same. An iteration that graded nothing is not counted."""
    sentences = {}
    for name in dict.fromkeys(name for each in last for name in each.ranges):
        ranges = [each.ranges[name] for each in last if name in each.ranges][-SEVERAL:]
        found = _joined(ranges)
        is_constant = found.highest - found.lowest <= SPREAD_TOLERANCE
        if is_constant and len(ranges) == SEVERAL and found.num_values >= FEWEST_VALUES:
            sentences[f"rewards.{name}"] = (
                f"rewards.{name}: {found.highest:.4g} for each of the {found.num_values} "
                f"completions of the last {SEVERAL} iterations, so that it prefers none of them "
                "and teaches nothing: a judge that does not look (read its replies in episodes/; "
                "is judge.model the right one, does it see the pictures, does a cache answer for "
                "it?), a reward that is written wrongly, or a task that is solved, or far too hard "
                f"(reward/range/{name})"
            )
    return sentences


def dead_groups(last: Sequence[Trained]) -> Mapping[str, str]:
    """Groups that fail as a whole."""
    shares = _values(last, "groups/dead")
    if len(shares) < TREND or fmean(shares) <= DEAD_SHARE:
        return {}
    return {
        "dead": f"{fmean(shares):.0%} of the groups of the last {TREND} iterations failed as a "
        "whole: their completions all earn the same, below 0.5, and the policy gradient learns "
        "nothing from them (groups/dead)"
    }


def no_spread(last: Sequence[Trained]) -> Mapping[str, str]:
    """Groups whose rewards are all equal: every one for `SEVERAL` iterations, or nearly every one
    on the average of `TREND`."""
    shares = _values(last, "groups/zero_spread")
    none_lately = len(shares) >= SEVERAL and min(shares[-SEVERAL:]) == 1
    if not none_lately and (len(shares) < TREND or fmean(shares) < HIGH_SHARE):
        return {}
    num, share = (SEVERAL, 1.0) if none_lately else (TREND, fmean(shares))
    return {
        "spread": f"{share:.0%} of the groups of the last {num} iterations have no spread: all "
        "rewards of a group are equal, and the policy gradient learns nothing from them: "
        f"{_why_no_spread(last[-1].metrics)} (groups/zero_spread)"
    }


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


def _moved(metrics: Mapping[str, float]) -> bool:
    """Whether the weights changed: a step whose gradient is exactly 0 changes nothing."""
    return metrics["optimizer/steps"] > 0 and metrics.get("optimizer/grad_norm") != 0


def no_steps(last: Sequence[Trained]) -> Mapping[str, str]:
    """Iterations that left the weights as they were."""
    if len(last) < SEVERAL or any(_moved(each.metrics) for each in last[-SEVERAL:]):
        return {}
    return {
        "steps": f"no optimiser step in the last {SEVERAL} iterations (optimizer/steps): the "
        f"weights stand still; {_why_no_step(last[-1].metrics)}"
    }


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


def mismatch(last: Sequence[Trained], dtype: str, first_k3: float | None) -> Mapping[str, str]:
    """An engine that samples from another distribution than the trainer computes. Only where both
    are meant to be one: on-policy, without a truncated distribution, without dropout."""
    most_k3, least_ess = MISMATCH_LIMITS[dtype]
    most_k3 = min(most_k3, max(most_k3 / 10, MISMATCH_GROWTH * (first_k3 or 0.0)))
    k3, ess = _values(last, "mismatch/k3")[-SEVERAL:], _values(last, "mismatch/ess")[-SEVERAL:]
    if len(k3) < SEVERAL or (min(k3) <= most_k3 and max(ess) >= least_ess):
        return {}
    return {
        "mismatch": "the inference engine does not sample from the policy that is trained: in each "
        f"of the last {SEVERAL} iterations their log-probs differ by more than rounding in {dtype} "
        f"explains (mismatch/k3 {k3[-1]:.2g} nats, limit {most_k3:.2g}; mismatch/ess "
        f"{ess[-1]:.3f}, limit {least_ess:g}). Adapter weights may arrive scaled, late or in part, "
        "or the engine samples at another temperature or sees other pictures. Rewards, gradients "
        "and held-out runs are of the engine's policy. Compare with engine.type 'transformers'"
    }
