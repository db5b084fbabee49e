"""Alarms over several iterations, each logged when its condition begins; they stop no run."""

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
from rl.run.exploits import ExploitWatch

if TYPE_CHECKING:
    from rl.ranks.dist import Dist
    from rl.rollout.stream import Rollout

SEVERAL = 3
TREND = 10
"""Iterations over which a share is averaged, because one iteration has only a few groups."""
DEAD_SHARE = 0.25
"""Average share of dead groups above which the alarm is logged."""
HIGH_SHARE = 0.9
FEWEST_VALUES = 8
"""Fewer values of a reward may be equal by chance."""
HALF = 0.5
"""Average share of distinct completions in a group; below it most completions are copies."""
FULL_MARKS = 0.99
LEAST_KL = 1e-9
"""nats a token; sound runs are at 2e-5 after their first step."""
MISMATCH_LIMITS = {"float32": (1e-5, 0.999), "float16": (1e-4, 0.99), "bfloat16": (1e-3, 0.95)}
"""Engine dtype -> (largest `mismatch/k3`, nats; smallest `mismatch/ess`) of correct runs.

Tiny runs reach a k3 of 1e-10 in float32 and 6e-5 in bfloat16; log-probs that differ by 0.025 on
average, as of a bfloat16 7B, give 5e-4. TF32 in a GPU's attention stays below the float32 limit."""
MISMATCH_GROWTH = 10
"""The limit of k3 is this many times the run's first k3 (only rounding, if the adapter still is 0),
but at most the limit of the dtype above, and at least a tenth of that."""

Range = tuple[float, float, int]
"""(lowest, highest, number) of a reward's values."""


@dataclass(frozen=True)
class Trained:
    """One training iteration."""

    metrics: Mapping[str, float]
    ranges: Mapping[str, Range]
    """Name of each reward, or part of one, that counts -> its values."""


Rule = Callable[[Sequence[Trained]], str]
"""The last iterations (at most `TREND`, oldest first) -> a sentence if the condition holds."""


class Watch:
    """Applies rules to the last iterations; reports a condition when it begins."""

    def __init__(self, config: RunConfig, engine_dtype: str, lora_dropout: float) -> None:
        """`config`: resolved; its `final_reward.weights` name the rewards that count."""
        weights = config.final_reward.weights or dict.fromkeys(config.rewards, 1.0)
        self._counted = [name for name, weight in weights.items() if weight]
        self._ranges: dict[str, Range] = {}
        self._iterations: deque[Trained] = deque(maxlen=TREND)
        self._active: set[str] = set()
        self._first_k3: float | None = None
        self.exploits = ExploitWatch()
        self._rules: dict[str, Rule] = {
            **{name: partial(constant_reward, name=name) for name in self._counted},
            "dead": dead_groups,
            "spread": no_spread,
            "steps": no_steps,
        }
        if config.algorithm.kl_coeff:
            self._rules["reference"] = no_kl
        truncates_sampling = config.sampling.top_p < 1 or config.sampling.top_k > 0
        if not (config.max_staleness or truncates_sampling or lora_dropout):
            self._rules["mismatch"] = lambda last: mismatch(last, engine_dtype, self._first_k3)

    def add_rewards(self, rollout: Rollout, dist: Dist) -> Metrics:
        """`reward/range/<name>` of each reward, or part of one, that counts. Collective."""
        arms = [episode for episodes_G in rollout.episodes for episode in episodes_G]
        arms += [bare for bare in rollout.bare_episodes if bare is not None]
        by_rank = dist.gather([{name: e.parts.get(name) for name in self._counted} for e in arms])
        metrics, self._ranges = Metrics(), {}
        for name in self._counted:
            reported = [parts[name] for parts_of_rank in by_rank for parts in parts_of_rank]
            values = [value for value in reported if value is not None]
            if values:
                self._ranges[name] = min(values), max(values), len(values)
                metrics.maximum(f"reward/range/{name}", max(values) - min(values))
        return metrics

    def sentences(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """A sentence for each condition that begins in the iteration with these metrics."""
        if "optimizer/steps" not in metrics:  # measured before training
            return
        self._iterations.append(Trained(metrics, self._ranges))
        if self._first_k3 is None:
            self._first_k3 = metrics.get("mismatch/k3")
        iterations = tuple(self._iterations)
        sentences = {name: text for name, rule in self._rules.items() if (text := rule(iterations))}
        new = sentences.keys() - self._active
        self._active = set(sentences)
        yield from (sentence for name, sentence in sentences.items() if name in new)
        yield from self.exploits.sentences(metrics)


def _values(last: Sequence[Trained], name: str) -> list[float]:
    return [each.metrics[name] for each in last if name in each.metrics]


def constant_reward(last: Sequence[Trained], name: str) -> str:
    """A reward has the same value for every picture. Iterations without grades do not count."""
    ranges = [each.ranges[name] for each in last if name in each.ranges][-SEVERAL:]
    if len(ranges) < SEVERAL:
        return ""
    lows, highs, nums = zip(*ranges, strict=True)
    highest, num = max(highs), sum(nums)
    if highest - min(lows) > SPREAD_TOLERANCE or num < FEWEST_VALUES:
        return ""
    return (
        f"rewards.{name}: {highest:.4g} for each of the {num} completions of the last {SEVERAL} "
        "iterations, so it teaches nothing. Possible causes: the judge ignores the pictures (read "
        "its replies in episodes/; is judge.model right, does a cache reply?), a wrong reward, "
        f"or the task is solved or far too hard (reward/range/{name})"
    )


def dead_groups(last: Sequence[Trained]) -> str:
    shares = _values(last, "groups/dead")
    if len(shares) < TREND or fmean(shares) <= DEAD_SHARE:
        return ""
    return (
        f"{fmean(shares):.0%} of the groups of the last {TREND} iterations failed completely: all "
        "completions of a group have the same reward, below 0.5, and teach nothing (groups/dead)"
    )


def no_spread(last: Sequence[Trained]) -> str:
    """All groups of `SEVERAL` iterations have no spread, or nearly all on average of `TREND`."""
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
        why = "all have the full reward; take harder data, or stop here"
    else:
        why = (
            "the rewards do not distinguish completions of one prompt; look at them in episodes/, "
            "take a finer or another reward, or easier data if all fail"
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
        why = "the gradient was exactly 0; are the parameters in the loss trainable?"
    else:
        why = "no token was in the loss; look at tokens/trained and at the policy's loss mask"
    return (
        f"no optimizer step in the last {SEVERAL} iterations (optimizer/steps): the weights do not "
        f"change; {why}"
    )


def no_kl(last: Sequence[Trained]) -> str:
    """The KL stays 0 although the weights move. (In the first iteration it is 0 in any run.)"""
    lately = last[-SEVERAL:]
    kl = _values(lately, "kl/reference_k3")
    has_moved = len(last) > SEVERAL and all(_moved(each.metrics) for each in last[-SEVERAL - 1 :])
    if not has_moved or len(kl) < SEVERAL or max(kl) > LEAST_KL:
        return ""
    return (
        f"the KL to the reference was 0 in each of the last {SEVERAL} iterations, though the "
        "weights move: the reference is the policy that is trained (Policy.reference must give the "
        "weights before training), or the steps are too small to change a log-prob "
        "(kl/reference_k3, optimizer/learning_rate)"
    )


def mismatch(last: Sequence[Trained], dtype: str, first_k3: float | None) -> str:
    """The engine samples from another distribution than the trainer computes. Used only where both
    should be equal: on-policy, without truncated sampling and without dropout."""
    max_k3, min_ess = MISMATCH_LIMITS[dtype]
    max_k3 = min(max_k3, max(max_k3 / 10, MISMATCH_GROWTH * (first_k3 or 0.0)))
    k3, ess = _values(last, "mismatch/k3")[-SEVERAL:], _values(last, "mismatch/ess")[-SEVERAL:]
    if len(k3) < SEVERAL or (min(k3) <= max_k3 and max(ess) >= min_ess):
        return ""
    return (
        f"the inference engine does not sample from the trained policy: in each of the last "
        f"{SEVERAL} iterations their log-probs differ by more than rounding in {dtype} explains "
        f"(mismatch/k3 {k3[-1]:.2g} nats, limit {max_k3:.2g}; mismatch/ess {ess[-1]:.3f}, limit "
        f"{min_ess:g}). Adapter weights may arrive scaled, late or in part, or the engine "
        "samples at another temperature or sees other pictures: compare with engine.type "
        "'transformers'"
    )
