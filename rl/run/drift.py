"""Compares an evaluation with the untrained system: gains, losses and hidden-state drift.

Axes: `_P` held-out samples of this rank, `_T` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rl.algorithm.metrics import Metrics
from rl.api.types import Completion, Episode, Prompt
from rl.console import warn
from rl.rollout.stream import RolloutContext
from rl.run.paired import LEAST_FALL, Paired, paired
from rl.run.stock import FixedArm, Rewards, Stock, word_states

if TYPE_CHECKING:
    import torch

    from rl.ranks.dist import Dist

LEAST_OF_REFERENCES = 0.2
"""In a chain that works the reference descriptions earn more; the small configs: 0.89 to 1."""
Hashes = Sequence[str]
"""Hashes of one sample's contents (`contents_of`)."""
_FIXED = {"bare": "the user's own words", "reference": "the reference descriptions"}
"""Arm -> how messages name its words, which training does not change."""


def state_distance(states_TD: torch.Tensor, base_TD: torch.Tensor) -> tuple[float, float]:
    """(relative L2 distance |h - h0| / |h0|, cosine): means over the tokens of states [T, D] of any
    dtype and device, computed in float32."""
    import torch

    base = base_TD.float()
    states = states_TD.to(base.device).float()
    moved_T = (states - base).norm(dim=-1) / base.norm(dim=-1)
    cosine_T = torch.cosine_similarity(states, base, dim=-1)
    return float(moved_T.mean()), float(cosine_T.mean())


def _compare(
    rewards_P: Sequence[float | None],
    others_P: Sequence[float | None],
    hashes_P: Sequence[Hashes],
    dist: Dist,
) -> Paired | None:
    """Differences over all ranks' samples that have both rewards; None if none has. Collective."""
    local_pairs = [
        (reward - other, hashes)
        for reward, other, hashes in zip(rewards_P, others_P, hashes_P, strict=True)
        if reward is not None and other is not None
    ]
    pairs = [pair for rank_pairs in dist.gather(local_pairs) for pair in rank_pairs]
    return paired([difference for difference, _ in pairs], [hashes for _, hashes in pairs])


def _add_paired(metrics: Metrics, name: str, difference: Paired | None) -> None:
    """Add mean and error as maxima over ranks, because every rank has the same values."""
    if difference is not None:
        metrics.maximum(name, difference.mean)
        if difference.error is not None:
            metrics.maximum(f"{name}_error", difference.error)


def add_stock_arm(
    metrics: Metrics,
    untrained_P: Sequence[Rewards],
    episodes: Sequence[Episode],
    hashes_P: Sequence[Hashes],
    dist: Dist,
) -> None:
    """Add the untrained system's rewards, and the trained system's gain over it. Collective."""
    for rewards in untrained_P:
        if "stock" in rewards:
            metrics.add("eval/stock_ungraded", float(rewards["stock"] is None))
        for arm, reward in rewards.items():
            if arm.startswith("stock") and reward is not None:
                metrics.add(f"eval/{arm}_reward", reward)
    stock_P = [rewards.get("stock") for rewards in untrained_P]
    gain = _compare([episode.reward for episode in episodes], stock_P, hashes_P, dist)
    _add_paired(metrics, "eval/gain_over_stock", gain)


def check_references(
    references_P: Sequence[Episode | None],
    untrained: Mapping[str, Sequence[Episode | None]],
    hashes_P: Sequence[Hashes],
    dist: Dist,
) -> None:
    """Warn, before training, if the reference descriptions earn next to nothing, or less than words
    that nobody trained: then no words can earn more. `untrained`: episodes _P of such words, by
    arm. Collective."""

    def rewards(episodes_P: Sequence[Episode | None]) -> list[float | None]:
        return [None if episode is None else episode.reward for episode in episodes_P]

    right_P = rewards(references_P)
    right = _compare(right_P, [0.0] * len(right_P), hashes_P, dist)
    if right is None or right.error is None:
        return
    ahead = {
        arm: _compare(rewards(episodes_P), right_P, hashes_P, dist)
        for arm, episodes_P in untrained.items()
    }
    better = [arm for arm, each in ahead.items() if each is not None and each.is_alarming]
    if dist.is_main and (better or right.mean < LEAST_OF_REFERENCES):
        beside = [f", {arm} {right.mean + each.mean:.3f}" for arm, each in ahead.items() if each]
        warn(
            f"before training the reference descriptions earn {right.mean:.3f}"
            f"{''.join(beside)}: training can hardly earn more. If a "
            "person finds these words right, a link between words and score is broken: the "
            "policy's states, the renderer's source pictures, or the instruction and picture that "
            "the judge reads belong to another sample. Look at evaluation/it_000000 and at what "
            "`rl judge audit` says of the judge by itself"
        )


def add_gain_of_thought(
    metrics: Metrics,
    episodes: Sequence[Episode],
    cut_P: Sequence[Episode | None],
    hashes_P: Sequence[Hashes],
    dist: Dist,
) -> None:
    """Add the gain from thinking; `cut_P`: the samples' episodes without thinking. Collective."""
    rewards_P = [None if episode is None else episode.reward for episode in cut_P]
    for reward in rewards_P:
        if reward is not None:
            metrics.add("eval/cut_thought_reward", reward)
    gain = _compare([episode.reward for episode in episodes], rewards_P, hashes_P, dist)
    _add_paired(metrics, "eval/gain_of_thought", gain)


def add_falls(
    metrics: Metrics,
    iteration: int,
    untrained_P: Sequence[Rewards],
    fixed: Mapping[str, FixedArm],
    hashes_P: Sequence[Hashes],
    dist: Dist,
) -> None:
    """Add how far the rewards of fixed words have fallen since training began; warns of a fall
    beyond noise. Collective."""
    alarms, untrained_means = [], []
    for arm, (_, episodes_P) in fixed.items():
        before_P = [rewards.get(arm) for rewards in untrained_P]
        after_P = [None if episode is None else episode.reward for episode in episodes_P]
        fall = _compare(before_P, after_P, hashes_P, dist)
        untrained = _compare(before_P, [0.0] * len(before_P), hashes_P, dist)
        _add_paired(metrics, f"drift/{arm}_fall", fall)
        if fall is None or untrained is None:
            continue
        untrained_means.append(untrained.mean)
        if fall.is_alarming:
            alarms.append(
                f"of {_FIXED[arm]} by {fall.mean:.3f} +- {fall.error:.3f} ({fall.num} samples of "
                f"{fall.num_clusters} sources)"
            )
        metrics.maximum("drift/alarm", float(bool(alarms)))
    if untrained_means and max(untrained_means) < LEAST_FALL and iteration == 0 and dist.is_main:
        warn(
            "the user's own words earn no reward under the untrained weights: drift/alarm cannot "
            "see a fall; drift/state_l2 says how far the states have moved, not whether that hurts"
        )
    if alarms and dist.is_main:
        warn(
            f"evaluation after {iteration} iterations: rewards fell, {' and '.join(alarms)}: the "
            "hidden states that the renderer reads have drifted. Start again with a lower "
            "optimizer.learning_rate or a higher algorithm.kl_coeff, or continue from this adapter "
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
    """Add the distance of the words' states from those under untrained weights. Collective."""
    pairs = [(p, words) for p, words in zip(prompts_P, words_P, strict=True) if words is not None]
    prompts, words = [prompt for prompt, _ in pairs], [words for _, words in pairs]
    base_P = stock.states(prompts, words)
    for states, base in zip(word_states(context, prompts, words, dist), base_P, strict=True):
        if states is not None and base is not None:
            moved, cosine = state_distance(states, base)
            metrics.add("drift/state_l2", moved, weight=len(base))
            metrics.add("drift/state_cosine", cosine, weight=len(base))
