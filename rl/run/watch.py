"""Alarms over several iterations, each logged when its condition begins. None stops a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from rl.algorithm.grpo import SPREAD_TOLERANCE
from rl.algorithm.metrics import Metrics
from rl.config.schema import RunConfig

if TYPE_CHECKING:
    from rl.ranks.dist import Dist
    from rl.rollout.stream import Rollout

SEVERAL = 3
TREND = 10
"""Iterations that a share is averaged over: one is a handful of groups."""
DEAD_SHARE = 0.25
"""Average share of dead groups that raises the alarm."""
HIGH_SHARE = 0.9
FEWEST_VALUES = 8
"""Fewer equal values of a reward may be chance."""
HALF = 0.5
"""Distinct completions / completions of a group, on average: below it most are copies."""
FULL_MARKS = 0.99
MISMATCH_LIMITS = {"float32": (1e-5, 0.999), "float16": (1e-4, 0.99), "bfloat16": (1e-3, 0.95)}
"""Engine dtype -> (largest `mismatch/k3`, nats; smallest `mismatch/ess`) of two sound forwards.

Sound tiny runs reach 1e-10 in float32 and 6e-5 in bfloat16; log-probs that differ by 0.025 on
average, as of a bfloat16 7B, give 5e-4. TF32 in a GPU's attention stays below the float32 limit."""
MISMATCH_GROWTH = 10
"""Times the run's first k3, which is rounding alone where the adapter is still 0: the limit where
that is lower, down to a tenth of the one above."""

Range = tuple[float, float, int]
"""(lowest, highest, number) of a reward's values."""


@dataclass(frozen=True)
class Trained:
    metrics: Mapping[str, float]
    ranges: Mapping[str, Range]
    """The values of each reward, or part of one, that counts."""


Rule = Callable[[Sequence[Trained]], str]
"""The last iterations, oldest first, `TREND` at most -> a sentence if its condition holds."""


class Watch:
    """Applies rules to the last iterations; reports a condition when it begins."""

    def __init__(self, config: RunConfig, engine_dtype: str, lora_dropout: float) -> None:
        """`config`: resolved, so that its weights name what counts."""
        weights = config.final_reward.weights or dict.fromkeys(config.rewards, 1.0)
        self._counted = [name for name, weight in weights.items() if weight]
        self._ranges: dict[str, Range] = {}
        self._last: deque[Trained] = deque(maxlen=TREND)
        self._holding: set[str] = set()
        self._first_k3: float | None = None
        self._rules: dict[str, Rule] = {
            **{name: partial(constant_reward, name=name) for name in self._counted},
            "dead": dead_groups,
            "spread": no_spread,
            "steps": no_steps,
        }
        cuts = config.sampling.top_p < 1 or config.sampling.top_k > 0
        if not (config.max_staleness or cuts or lora_dropout):
            self._rules["mismatch"] = lambda last: mismatch(last, engine_dtype, self._first_k3)

    def add_rewards(self, rollout: Rollout, dist: Dist) -> Metrics:
        """`reward/range/<name>` of each reward, or part of one, that counts. Collective."""
        arms = [episode for episodes_G in rollout.episodes for episode in episodes_G]
        arms += [bare for bare in rollout.bare_episodes if bare is not None]
        by_rank = dist.gather([{name: e.parts.get(name) for name in self._counted} for e in arms])
        metrics, self._ranges = Metrics(), {}
        for name in self._counted:
            found = [parts[name] for parts_of_rank in by_rank for parts in parts_of_rank]
            values = [value for value in found if value is not None]
            if values:
                self._ranges[name] = min(values), max(values), len(values)
                metrics.maximum(f"reward/range/{name}", max(values) - min(values))
        return metrics

    def sentences(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """A sentence for each condition that begins in an iteration of these metrics."""
        if "optimizer/steps" not in metrics:  # measured before training
            return
        self._last.append(Trained(metrics, self._ranges))
        if self._first_k3 is None:
            self._first_k3 = metrics.get("mismatch/k3")
        last = tuple(self._last)
        found = {name: text for name, rule in self._rules.items() if (text := rule(last))}
        begun = found.keys() - self._holding
        self._holding = set(found)
        yield from (sentence for name, sentence in found.items() if name in begun)


def _values(last: Sequence[Trained], name: str) -> list[float]:
    return [each.metrics[name] for each in last if name in each.metrics]


def constant_reward(last: Sequence[Trained], name: str) -> str:
    """A reward that gives every picture the same. Iterations that graded nothing do not count."""
    ranges = [each.ranges[name] for each in last if name in each.ranges][-SEVERAL:]
    if len(ranges) < SEVERAL:
        return ""
    lows, highs, nums = zip(*ranges, strict=True)
    highest, num = max(highs), sum(nums)
    if highest - min(lows) > SPREAD_TOLERANCE or num < FEWEST_VALUES:
        return ""
    return (
        f"rewards.{name}: {highest:.4g} for each of the {num} completions of the last {SEVERAL} "
        "iterations, so it teaches nothing: a judge that does not look (read its replies in "
        "episodes/; is judge.model the right one, does a cache answer for it?), a wrong reward, or "
        f"a task that is solved or far too hard (reward/range/{name})"
    )


def dead_groups(last: Sequence[Trained]) -> str:
    shares = _values(last, "groups/dead")
    if len(shares) < TREND or fmean(shares) <= DEAD_SHARE:
        return ""
    return (
        f"{fmean(shares):.0%} of the groups of the last {TREND} iterations failed as a whole: "
        "all completions earn the same, below 0.5, and teach nothing (groups/dead)"
    )


def no_spread(last: Sequence[Trained]) -> str:
    """All groups for `SEVERAL` iterations, or nearly all on average of `TREND`."""
    shares = _values(last, "groups/zero_spread")
    none_lately = len(shares) >= SEVERAL and min(shares[-SEVERAL:]) == 1
    if not none_lately and (len(shares) < TREND or fmean(shares) < HIGH_SHARE):
        return ""
    num, share = (SEVERAL, 1.0) if none_lately else (TREND, fmean(shares))
    metrics = last[-1].metrics
    if metrics.get("status/policy_failed") == 1:
        why = "no completion could be used; the causes are in episodes/"
    elif metrics.get("status/ungraded") == 1:
        why = "no picture was graded; the causes are in episodes/"
    elif metrics.get("groups/distinct_completions", 1) < HALF:
        why = "most completions are copies; raise sampling.temperature, or go back to a checkpoint"
    elif metrics.get("reward/mean", 0) >= FULL_MARKS:
        why = "they all earn full marks; take harder data, or stop here"
    else:
        why = (
            "the rewards do not distinguish completions of one prompt; look at them in episodes/, "
            "take a finer or another reward, or easier data where all fail"
        )
    return (
        f"{share:.0%} of the groups of the last {num} iterations have no spread: all rewards of a "
        f"group are equal and teach nothing: {why} (groups/zero_spread)"
    )


def _moved(metrics: Mapping[str, float]) -> bool:
    """Whether the weights changed: a step whose gradient is exactly 0 changes nothing."""
    return metrics["optimizer/steps"] > 0 and metrics.get("optimizer/grad_norm") != 0


def no_steps(last: Sequence[Trained]) -> str:
    if len(last) < SEVERAL or any(_moved(each.metrics) for each in last[-SEVERAL:]):
        return ""
    metrics = last[-1].metrics
    if metrics.get("optimizer/skipped_steps"):
        why = (
            "the gradient was not finite and was left out (optimizer/skipped_steps); look for a "
            "NaN in the losses, lower optimizer.learning_rate, or load other weights"
        )
    elif metrics.get("status/ungraded") == 1:
        why = "nothing was graded; the causes are in episodes/"
    elif metrics.get("groups/zero_spread") == 1:
        why = "all rewards of each group were equal, and nothing else is minimised"
    elif metrics["optimizer/steps"] > 0:
        why = "the gradient was exactly 0; is what the loss reads of the policy still trainable?"
    else:
        why = "no token carried a loss; look at tokens/trained and at the policy's loss mask"
    return (
        f"no optimiser step in the last {SEVERAL} iterations (optimizer/steps): the weights do not "
        f"change; {why}"
    )


def mismatch(last: Sequence[Trained], dtype: str, first_k3: float | None) -> str:
    """An engine that samples from another distribution than the trainer computes, where both are
    meant to be one: on-policy, without truncation, without dropout."""
    most_k3, least_ess = MISMATCH_LIMITS[dtype]
    most_k3 = min(most_k3, max(most_k3 / 10, MISMATCH_GROWTH * (first_k3 or 0.0)))
    k3, ess = _values(last, "mismatch/k3")[-SEVERAL:], _values(last, "mismatch/ess")[-SEVERAL:]
    if len(k3) < SEVERAL or (min(k3) <= most_k3 and max(ess) >= least_ess):
        return ""
    return (
        f"the inference engine does not sample from the trained policy: in each of the last "
        f"{SEVERAL} iterations their log-probs differ by more than rounding in {dtype} explains "
        f"(mismatch/k3 {k3[-1]:.2g} nats, limit {most_k3:.2g}; mismatch/ess {ess[-1]:.3f}, limit "
        f"{least_ess:g}). Adapter weights may arrive scaled, late or in part, or the engine "
        "samples at another temperature or sees other pictures: compare with engine.type "
        "'transformers'"
    )
