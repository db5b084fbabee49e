"""Warns of trends that training should not have, and of gaps between rewards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.algorithm.grpo import SPREAD_TOLERANCE
from rl.algorithm.metrics import Metrics
from rl.api.types import Status
from rl.config.schema import RunConfig
from rl.console import warn
from rl.files import read_rows
from rl.printing import excerpt
from rl.run.paired import NUM_ERRORS, ExploitWatch, Paired, paired

if TYPE_CHECKING:
    from rl.ranks.dist import Dist
    from rl.rollout.stream import Rollout

# ---- watch ---------------------------------------------------------------------------------------
# Alarms over several iterations, each logged when its condition begins; they stop no run.

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
MISMATCH_LIMITS = {
    "float32": (1e-6, 1e-5, 0.999), "float16": (1e-5, 2e-3, 0.99), "bfloat16": (1e-4, 8e-3, 0.95)
}  # fmt: skip
"""Engine dtype -> (smallest and largest limit of `mismatch/k3`, nats; smallest `mismatch/ess`).

Tiny correct runs reach a k3 of 1e-10 in float32 and 6e-5 in bfloat16; SmolLM2-135M in bfloat16 on a
CPU 0.0024 on average of 60 prompts and 0.0041 at most. TF32 in a GPU's attention stays below 1e-5.
Log-probs that differ by as much as a sync allows (0.1 nats in bfloat16, 0.05 in float16) have a k3
of 0.008 and 0.002."""
MISMATCH_GROWTH = 10
"""The limit of k3 is this many times the k3 of the run's first iteration, whose completions were
sampled before the first update, within the range above."""
MISMATCHED = 2
"""Iterations beyond the limit that are no transient: a fault that begins with the first update is
named in the third."""

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
        self._first: list[Mapping[str, float]] = []
        """The lines of the run's first `SEVERAL` iterations."""
        self.exploits = ExploitWatch()
        self._rules: dict[str, Rule] = {
            **{name: partial(constant_reward, name=name) for name in self._counted},
            "dead": dead_groups,
            "spread": no_spread,
            "steps": no_steps,
            "downwards": downwards,
            "repeated": repeated_prompts,
            "fallen": lambda last: fallen(last, self._first, config.prompts_per_iteration),
        }
        if config.algorithm.kl_coeff:
            self._rules["reference"] = no_kl
        truncates_sampling = config.sampling.top_p < 1 or config.sampling.top_k > 0
        if not (config.max_staleness or truncates_sampling or lora_dropout):
            self._rules["mismatch"] = lambda last: mismatch(last, engine_dtype, self._first)

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

    def replay(self, metrics: Mapping[str, float]) -> None:
        """Read a line of an earlier process, whose alarms are logged already."""
        self._remember(metrics)
        list(self.exploits.sentences(metrics))

    def _remember(self, metrics: Mapping[str, float]) -> None:
        if "optimizer/steps" in metrics and len(self._first) < SEVERAL:
            self._first.append(metrics)

    def sentences(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """A sentence for each condition that begins in the iteration with these metrics."""
        if "optimizer/steps" not in metrics:  # measured before training
            return
        self._iterations.append(Trained(metrics, self._ranges))
        self._remember(metrics)
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
    if len(kl) < SEVERAL or max(kl) > LEAST_KL or not all(_moved(e.metrics) for e in lately):
        return ""
    return (
        f"the KL to the reference was 0 in each of the last {SEVERAL} iterations, though the "
        "weights move: the reference is the policy that is trained (Policy.reference must give the "
        "weights before training), or the steps are too small to change a log-prob "
        "(kl/reference_k3, optimizer/learning_rate)"
    )


def downwards(last: Sequence[Trained]) -> str:
    """The first step of an iteration makes better completions less likely."""
    metrics = last[-1].metrics
    rise, error = metrics.get("policy/rise", 0.0), metrics.get("policy/rise_error", 0.0)
    if rise >= -NUM_ERRORS * error:
        return ""
    return (
        "learning points downwards: the optimizer step made completions with a reward above their "
        "group's mean less likely, or those below it more likely (excess of reward x change of the "
        f"log-prob: {rise:.2g} +- {error:.1g} nats, policy/rise). The sign of the advantages or of "
        "the loss is wrong, or the trained rows are not those that were graded"
    )


def repeated_prompts(last: Sequence[Trained]) -> str:
    """Prompts are trained twice although the data has enough others."""
    nums = _values(last, "data/repeated_prompts")[-SEVERAL:]
    if len(nums) < SEVERAL or not min(nums):
        return ""
    return (
        f"{nums[-1]:.0f} prompts of an iteration repeat others of it, in each of the last {SEVERAL}"
        " iterations, more than the size of the data explains: a rank trains on another one's "
        "prompts or on its own twice, or different rows have one id (data/repeated_prompts)"
    )


def fallen(last: Sequence[Trained], first: Sequence[Mapping[str, float]], num_groups: int) -> str:
    """The training reward is below that of the run's first iterations beyond chance. The standard
    error takes a group as one value, so it is too large rather than too small."""
    lately = [each.metrics for each in last[-SEVERAL:]]
    lines = [line for line in (*first, *lately) if {"reward/mean", "reward/std"} <= line.keys()]
    if len(lines) < 2 * SEVERAL:
        return ""
    before, after = (
        fmean(line["reward/mean"] for line in part) for part in (lines[:SEVERAL], lines[SEVERAL:])
    )
    error = (sum(line["reward/std"] ** 2 for line in lines) / num_groups) ** 0.5 / SEVERAL
    if before - after <= NUM_ERRORS * error:
        return ""
    return (
        f"the training reward fell from {before:.3f} (the run's first {SEVERAL} iterations) to "
        f"{after:.3f} (the last {SEVERAL}), by more than {NUM_ERRORS:g} standard errors "
        f"({error:.3f}): the policy gets worse at what it is trained for. Lower "
        "optimizer.learning_rate or raise algorithm.kl_coeff, and start from an older checkpoint; "
        "if it falls from the first iterations on, look for scores of other completions in "
        "episodes/ (reward/mean)"
    )


def mismatch(last: Sequence[Trained], dtype: str, first: Sequence[Mapping[str, float]]) -> str:
    """The engine samples from another distribution than the trainer computes. Used only where both
    should be equal: on-policy, without truncated sampling and without dropout."""
    least, most, min_ess = MISMATCH_LIMITS[dtype]
    first_k3 = next((line["mismatch/k3"] for line in first if "mismatch/k3" in line), 0.0)
    max_k3 = min(most, max(least, MISMATCH_GROWTH * first_k3))
    k3, ess = (_values(last, f"mismatch/{name}")[-MISMATCHED:] for name in ("k3", "ess"))
    if len(k3) < MISMATCHED or (min(k3) <= max_k3 and max(ess) >= min_ess):
        return ""
    return (
        f"the inference engine does not sample from the trained policy: in each of the last "
        f"{MISMATCHED} iterations their log-probs differ by more than rounding in {dtype} explains "
        f"(mismatch/k3 {k3[-1]:.2g} nats, limit {max_k3:.2g}; mismatch/ess {ess[-1]:.3f}, limit "
        f"{min_ess:g}). Adapter weights may arrive scaled, late or in part, or the engine "
        "samples at another temperature or sees other pictures: compare with engine.type "
        "'transformers'"
    )


# ---- reward gap ----------------------------------------------------------------------------------
# Compares the gain in the final reward with that in rewards which train nothing (`held_out_only`):
# where the policy exploits its judge, such a reward stays behind.

Rewards = tuple[float, float]
"""One sample's final reward, and its reward by the plugin that trains nothing; 0..1 each."""
LEAST_GAP = 0.05
"""Smallest gap (0..1) worth an alarm. If the second reward reaches its highest marks before the
final reward does, even a sound policy makes a small gap."""
FEWEST = 8
"""Fewer samples cannot relate one reward to the other."""
MAX_CAUSE_CHARS = 300


def slope_of(pairs_S: Sequence[Rewards]) -> tuple[float, float, float | None]:
    """(least-squares slope of the second reward on the final one, its standard error, their
    correlation). A negative slope counts as 0; (0, 0, None) for fewer than `FEWEST` samples, or if
    either reward is the same for all."""
    if len(pairs_S) < FEWEST:
        return 0.0, 0.0, None
    x, y = (values - values.mean() for values in np.array(pairs_S).T)
    if min(x @ x, y @ y) < 1e-12:
        return 0.0, 0.0, None
    slope, correlation = float(x @ y / (x @ x)), float(x @ y / np.sqrt((x @ x) * (y @ y)))
    error = float(np.sqrt(((y - slope * x) ** 2).sum() / (len(x) - 2) / (x @ x)))
    return (slope, error, correlation) if slope > 0 else (0.0, 0.0, correlation)


def gap_of(
    first: Mapping[str, Rewards], now: Mapping[str, Rewards], hashes: Mapping[str, Sequence[str]]
) -> tuple[Paired, float] | None:
    """(mean over samples of slope x (gain in the final reward) - (gain in the second one), mean
    gain in the final reward), over the samples that both evaluations have; None without any.

    `slope_of` the first evaluation translates between the scales, and its error is added. A slope
    is too small by the final reward's unreliability, so noise of either reward makes no gap.
    """
    slope, slope_error, _ = slope_of(list(first.values()))
    ids = [key for key in now if key in first]
    gains = [(now[key][0] - first[key][0], now[key][1] - first[key][1]) for key in ids]
    behind = paired([slope * one - two for one, two in gains], [hashes[key] for key in ids])
    if behind is None:
        return None
    gain = float(np.mean([one for one, _ in gains]))
    if behind.error is not None:
        error = (behind.error**2 + (slope_error * gain) ** 2) ** 0.5
        behind = replace(behind, error=error)
    return behind, gain


def add_gaps(
    metrics: Metrics, names: Iterable[str], folder: Path, records_S: Sequence[Mapping[str, Any]]
) -> None:
    """Add `eval/gap/<name>` and its companions for each reward in `names`; warn of gaps beyond
    noise, and of pictures that the reward did not grade. `records_S`: the records of the
    evaluation in `folder` (`<run>/evaluation/it_000010`); the first ones are read from beside it.
    """
    for name in names:
        drawn = [record for record in records_S if record["status"] == Status.SCORED.value]
        now = _pairs(drawn, name)
        failures = [record["failure"] for record in drawn if record["id"] not in now]
        metrics.add(f"eval/ungraded/{name}", 1.0, weight=len(failures))
        metrics.add(f"eval/ungraded/{name}", 0.0, weight=len(now))
        if failures:
            warn(
                f"{name} did not grade {len(failures)} of {len(drawn)} held-out pictures; training "
                f"goes on. First cause: {excerpt(str(failures[0]), MAX_CAUSE_CHARS)}"
            )
        correlation = slope_of(list(now.values()))[2]
        if correlation is not None:
            metrics.maximum(f"eval/correlation/{name}", correlation)
        hashes = {record["id"]: record["shown"] for record in drawn}
        result = gap_of(_first_pairs(folder, name) or now, now, hashes)
        if result is not None:
            _add_gap(metrics, name, folder, *result)


def _add_gap(metrics: Metrics, name: str, folder: Path, gap: Paired, gain: float) -> None:
    is_alarming = gap.is_alarming and gap.mean > LEAST_GAP and gain >= 0
    metrics.maximum(f"eval/gap/{name}", gap.mean)
    if gap.error is not None:
        metrics.maximum(f"eval/gap_error/{name}", gap.error)
    metrics.maximum(f"eval/gap_alarm/{name}", float(is_alarming))
    if is_alarming:
        warn(
            f"evaluation {folder.name}: the held-out reward rose by {gain:+.3f}, and {name}, which "
            f"trains nothing, stays {gap.mean:.3f} +- {gap.error:.3f} behind what that predicts "
            f"({gap.num} samples): the policy may exploit its judge. Compare both rewards on the "
            "page's held-out samples"
        )


def _pairs(records: Iterable[Mapping[str, Any]], name: str) -> dict[str, Rewards]:
    """Sample id -> its rewards, where both are known."""
    return {
        record["id"]: (record["reward"], record["parts"][name])
        for record in records
        if record["status"] == Status.SCORED.value and name in record["parts"]
    }


def _first_pairs(folder: Path, name: str) -> dict[str, Rewards]:
    """The rewards of the first evaluation before that in `folder` which `name` graded."""
    for path in sorted(folder.parent.glob("it_*/records.jsonl")):
        if path.parent.name < folder.name and (pairs := _pairs(read_rows(path)[0], name)):
            return pairs
    return {}
