"""What is gained over the untrained system, and how far training has moved what the renderer reads.

What: paired differences with their standard error, whether a fall is an alarm, the distance of
states, as metrics. What not: drawing and judging (`evaluation.py`, `stock.py`).

Axes: `_P` held-out samples of this rank, `_T` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from rl.algorithm.metrics import Metrics
from rl.api.types import Completion, Episode, Prompt
from rl.record.console import warn
from rl.rollout.stream import RolloutContext
from rl.run.stock import FixedArm, Rewards, Stock, word_states

if TYPE_CHECKING:
    import torch

    from rl.ranks.dist import Dist

_WORDS = {"bare": "the user's own words", "reference": "the right words"}
"""Arms of fixed words."""

LEAST_FALL = 0.02
"""Reward (0..1), a fifth of a judge's mark of ten: less is not worth anybody's attention, however
sure it is."""
NUM_ERRORS = 3.0
"""Standard errors beyond which a fall is no noise: of a run's few dozen held-out evaluations, less
than one in twenty runs is alarmed by chance (one-sided normal: 0.0013 each)."""


@dataclass(frozen=True)
class Paired:
    """Differences between two arms, sample by sample: what both share cancels."""

    mean: float
    error: float | None
    """Standard error of the mean, from their own spread; None for a single sample."""
    num: int

    @property
    def is_alarming(self) -> bool:
        """Whether it is a rise beyond noise, and large enough to matter."""
        if self.error is None:
            return False
        return self.mean > max(LEAST_FALL, NUM_ERRORS * self.error)


def paired(differences: Sequence[float]) -> Paired | None:
    """None: nothing to compare."""
    if not differences:
        return None
    num = len(differences)
    error = stdev(differences) / num**0.5 if num > 1 else None
    return Paired(fmean(differences), error, num)


def state_distance(states_TD: torch.Tensor, base_TD: torch.Tensor) -> tuple[float, float]:
    """(relative L2 distance |h - h0| / |h0|, cosine), means over the tokens of [T, D] states, any
    dtype and device, computed in float32."""
    import torch

    base = base_TD.float()
    states = states_TD.to(base.device).float()
    moved_T = (states - base).norm(dim=-1) / base.norm(dim=-1)
    cosine_T = torch.cosine_similarity(states, base, dim=-1)
    return float(moved_T.mean()), float(cosine_T.mean())


def _compare(
    rewards_P: Sequence[float | None], others_P: Sequence[float | None], dist: Dist
) -> Paired | None:
    """Over all ranks' samples that have both; None where there is none. Collective."""
    differences = [
        reward - other
        for reward, other in zip(rewards_P, others_P, strict=True)
        if reward is not None and other is not None
    ]
    return paired([d for of_rank in dist.gather(differences) for d in of_rank])


def _add_paired(metrics: Metrics, name: str, found: Paired | None) -> None:
    """The same on every rank, hence no sum over them."""
    if found is not None:
        metrics.maximum(name, found.mean)
        if found.error is not None:
            metrics.maximum(f"{name}_error", found.error)


def add_stock_arm(
    metrics: Metrics, untrained_P: Sequence[Rewards], episodes: Sequence[Episode], dist: Dist
) -> None:
    """What the untrained system is worth, and what the trained one gained over it. Collective."""
    for rewards in untrained_P:
        if "stock" in rewards:
            metrics.add("eval/stock_ungraded", float(rewards["stock"] is None))
        for arm, reward in rewards.items():
            if arm.startswith("stock") and reward is not None:
                metrics.add(f"eval/{arm}_reward", reward)
    stock_P = [rewards.get("stock") for rewards in untrained_P]
    gain = _compare([episode.reward for episode in episodes], stock_P, dist)
    _add_paired(metrics, "eval/gain_over_stock", gain)


def add_gain_of_thought(
    metrics: Metrics, episodes: Sequence[Episode], cut_P: Sequence[Episode | None], dist: Dist
) -> None:
    """What thinking was worth: `cut_P` are the same samples' episodes without it. Collective."""
    rewards_P = [None if episode is None else episode.reward for episode in cut_P]
    for reward in rewards_P:
        if reward is not None:
            metrics.add("eval/cut_thought_reward", reward)
    gain = _compare([episode.reward for episode in episodes], rewards_P, dist)
    _add_paired(metrics, "eval/gain_of_thought", gain)


def add_falls(
    metrics: Metrics,
    iteration: int,
    untrained_P: Sequence[Rewards],
    fixed: Mapping[str, FixedArm],
    dist: Dist,
) -> None:
    """What words that training did not change have lost by it, aloud where it is no noise.
    Collective."""
    alarms, worths = [], []
    for arm, (_, episodes_P) in fixed.items():
        before_P = [rewards.get(arm) for rewards in untrained_P]
        after_P = [None if episode is None else episode.reward for episode in episodes_P]
        fall = _compare(before_P, after_P, dist)
        worth = _compare(before_P, [0.0] * len(before_P), dist)
        _add_paired(metrics, f"drift/{arm}_fall", fall)
        if fall is None or worth is None:
            continue
        worths.append(worth.mean)
        if fall.is_alarming:
            alarms.append(
                f"{_WORDS[arm]} lost {fall.mean:.3f} +- {fall.error:.3f} ({fall.num} samples)"
            )
        metrics.maximum("drift/alarm", float(bool(alarms)))
    if worths and max(worths) < LEAST_FALL and iteration == 0 and dist.is_main:
        warn(
            "the user's own words earn nothing under the untrained weights, so drift cannot take "
            "anything from them: drift/alarm will be silent, and drift/state_l2 says how far the "
            "states have moved, not whether that hurts"
        )
    if alarms and dist.is_main:
        warn(
            f"held-out run after {iteration} iterations: {' and '.join(alarms)} of the reward that "
            "they had before training: what the renderer reads has drifted. Where bare_reward "
            "falls reward_gain rises, eval/gain_over_stock does not. Begin again with a lower "
            "optimizer.learning_rate or a higher algorithm.kl_coeff, or go on from this adapter "
            "(policy.adapter_path) with policy.conditioning 'base'"
        )


def add_state_drift(
    metrics: Metrics,
    context: RolloutContext,
    stock: Stock,
    prompts_P: Sequence[Prompt],
    words_P: Sequence[Completion | None],
    dist: Dist,
) -> None:
    """How far the states of those words have moved from the untrained weights'. Collective."""
    known = [
        (prompt, words)
        for prompt, words in zip(prompts_P, words_P, strict=True)
        if words is not None
    ]
    asked, words = [prompt for prompt, _ in known], [words for _, words in known]
    base_P = stock.states(asked, words)
    for states, base in zip(word_states(context, asked, words, dist), base_P, strict=True):
        if states is not None and base is not None:
            moved, cosine = state_distance(states, base)
            metrics.add("drift/state_l2", moved, weight=len(base))
            metrics.add("drift/state_cosine", cosine, weight=len(base))
