"""Metrics of an iteration's episodes and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import fmean, pvariance
from typing import TYPE_CHECKING

import numpy as np
from PIL.Image import Resampling

from rl.algorithm.grpo import RewardMoments, reward_moments
from rl.algorithm.metrics import SPREAD_TOLERANCE, Metrics
from rl.api.types import NO_MARKER, UNFINISHED_THOUGHT, Completion, Episode, Status
from rl.run.paired import ratio

if TYPE_CHECKING:
    from PIL.Image import Image

    from rl.ranks.dist import Dist
    from rl.rollout.stream import Rollout

# ---- picture signals -----------------------------------------------------------------------------
# Measures what a policy could exploit in a judge: likeness to the source, sharpness, saturation,
# length; and whether the reward pays for it within groups.
#
# Axes: `_G` completions of a group, `_C` groups of all ranks.

SIDE_PX = 32
"""Side of the thumbnails that are compared with the source."""
COPY_LEVEL = 1 / 8
"""A picture is a copy if no pixel of its thumbnail differs from the source's by more, in any
channel (0..1). In small runs the largest difference is 0.07 to 0.12 for unchanged pictures, which a
VAE has decoded, and above 0.35 for most edited ones."""
CROP_PX = 512
"""Sharpness is measured in at most this square in the middle, at full resolution."""
PAID = 0.5
"""A copy with at least this reward (0..1) is rewarded without a visible change."""
COMPARED = ("similarity", "sharpness", "saturation", "length")
"""Signals whose correlation with the reward is measured."""


@dataclass(frozen=True)
class View:
    """What is compared of a picture."""

    thumbnail: np.ndarray
    """[SIDE_PX, SIDE_PX, 3] float32, 0..1."""
    sharpness: float
    saturation: float

    @classmethod
    def of(cls, picture: Image) -> View:
        small = picture.convert("RGB").resize((SIDE_PX, SIDE_PX), Resampling.BOX)
        saturation = float(np.asarray(small.convert("HSV"))[..., 1].mean()) / 255
        return cls(np.asarray(small, dtype=np.float32) / 255, _sharpness(picture), saturation)


def _sharpness(picture: Image) -> float:
    if min(picture.size) < 3:
        return 0.0
    left, top = (max(0, (side - CROP_PX) // 2) for side in picture.size)
    width, height = (min(side, CROP_PX) for side in picture.size)
    middle = picture.crop((left, top, left + width, top + height))
    light = np.asarray(middle.convert("L"), dtype=np.int16)
    neighbours = light[:-2, 1:-1] + light[2:, 1:-1] + light[1:-1, :-2] + light[1:-1, 2:]
    return float(np.log2((neighbours - 4 * light[1:-1, 1:-1]).var(dtype=np.float32) + 1))


def signals(picture: View, source: View | None) -> dict[str, float]:
    """Four numbers of one picture; without a source the first two are absent and the others
    absolute.

    similarity: 1 - mean absolute difference to the source's thumbnail (0..1); copies: 1 or 0
    (`COPY_LEVEL`); sharpness: log2(1 + variance of the luminance's Laplacian, levels of 0..255)
    in the middle, minus the source's; saturation: mean S of HSV (0..1), minus the source's.
    """
    if source is None:
        return {"sharpness": picture.sharpness, "saturation": picture.saturation}
    difference = np.abs(picture.thumbnail - source.thumbnail)
    return {
        "similarity": 1 - float(difference.mean()),
        "copies": float(difference.max() <= COPY_LEVEL),
        "sharpness": picture.sharpness - source.sharpness,
        "saturation": picture.saturation - source.saturation,
    }


def _signals_of_group(episodes_G: Sequence[Episode]) -> list[dict[str, float]]:
    """_G, `signals` of each completion's first picture, and its length in tokens."""
    sources: dict[tuple[int, int], View | None] = {}
    known: dict[int, dict[str, float]] = {}  # equal completions share one picture
    for episode in episodes_G:
        picture, source = episode.image, episode.prompt.sample.source
        if picture is None or id(picture) in known:
            continue
        if picture.size not in sources:
            sources[picture.size] = (
                None
                if source is None
                else View.of(source.convert("RGB").resize(picture.size, Resampling.BICUBIC))
            )
        known[id(picture)] = signals(View.of(picture), sources[picture.size])
    return [
        {**known.get(id(e.image), {}), "length": float(len(e.completion.token_ids))}
        for e in episodes_G
    ]


def add_signals(metrics: Metrics, episodes_PG: Sequence[Sequence[Episode]], dist: Dist) -> None:
    """Add the signals' means, the shares of copies and of rewarded copies, and each signal's
    correlation with the reward within groups. Collective."""
    sums: dict[str, list[tuple[float, float, float]]] = {name: [] for name in COMPARED}
    for episodes_G in episodes_PG:
        found_G = _signals_of_group(episodes_G)
        pairs_of: dict[str, list[tuple[float, float]]] = {name: [] for name in COMPARED}
        for episode, found in zip(episodes_G, found_G, strict=True):
            reward = episode.reward
            for name, value in found.items():
                if name != "length":
                    metrics.add(f"pictures/{name}", value)
                if name in COMPARED and episode.status is Status.SCORED and reward is not None:
                    pairs_of[name].append((value, reward))
            if "copies" in found and reward is not None:
                metrics.add("pictures/rewarded_copies", float(found["copies"] and reward >= PAID))
        for name, pairs in pairs_of.items():
            sums[name].append(_sums_of_squares(pairs))
    gathered = dist.gather(sums)
    for name in COMPARED:
        sums_C3 = np.array([sums_3 for of_rank in gathered for sums_3 in of_rank[name]])
        correlation = within_groups(sums_C3.reshape(-1, 3))
        if correlation is not None:
            metrics.maximum(f"reward/correlation/{name}", correlation[0])
            metrics.maximum(f"reward/correlation/{name}_error", correlation[1])


def _sums_of_squares(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """(S_xx, S_xy, S_yy) of the pairs' deviations from their means."""
    if len(pairs) < 2:
        return 0.0, 0.0, 0.0
    x, y = (np.array(values) - fmean(values) for values in zip(*pairs, strict=True))
    return float(x @ x), float(x @ y), float(y @ y)


def within_groups(sums_C3: np.ndarray) -> tuple[float, float] | None:
    """(correlation within groups, its standard error) from the groups' (S_xx, S_xy, S_yy), [C, 3].

    The correlation is the slope of the pooled regression within groups, S_xy / S_xx, times
    sqrt(S_xx / S_yy); its error is the slope's cluster-robust one (`paired`) times the same factor.
    None if fewer than two groups differ in both.
    """
    used = sums_C3[(sums_C3[:, 0] > 1e-12) & (sums_C3[:, 2] > 1e-12)]
    if len(used) < 2:
        return None
    slope, error = ratio(used[:, 1], used[:, 0])
    scale = float(np.sqrt(used[:, 0].sum() / used[:, 2].sum()))
    return slope * scale, error * scale


# ---- episode metrics -----------------------------------------------------------------------------
# Computes the metrics of an iteration's episodes.

HALF_MARKS = 0.5
"""A group is dead (teaches nothing) if its rewards (0..1) are all equal and below this."""

HALF_UNREADABLE = 0.5
"""Unreadable replies cluster in a group if more than this share of it got one."""


def size_text(completions_PG: Sequence[Sequence[Completion]]) -> str:
    """For the console: '96 completions, 1240 tokens'."""
    lengths = [len(c.token_ids) for completions_G in completions_PG for c in completions_G]
    return f"{len(lengths)} completions, {sum(lengths)} tokens"


def rollout_metrics(rollout: Rollout, dist: Dist) -> Metrics:
    """Metrics of rewards, statuses, lengths, latencies and the bare variant. Collective."""
    metrics = Metrics()
    for episodes_G, bare in zip(rollout.episodes, rollout.bare_episodes, strict=True):
        _add_group(metrics, episodes_G)
        add_bare_arm(metrics, "", episodes_G, bare)
    add_signals(metrics, rollout.episodes, dist)
    local = reward_moments([[e.reward for e in episodes_G] for episodes_G in rollout.episodes])
    metrics.maximum("reward/std", RewardMoments(*dist.sum_floats(astuple(local))).std)
    return metrics


def add_ranges(metrics: Metrics, rollout: Rollout, names: Sequence[str], dist: Dist) -> None:
    """Add `reward/range/<name>` of the rewards, or parts of one, in `names`. Collective."""
    episodes = [episode for episodes_G in rollout.episodes for episode in episodes_G]
    episodes += [bare for bare in rollout.bare_episodes if bare is not None]
    by_rank = dist.gather([{name: e.parts.get(name) for name in names} for e in episodes])
    for name in names:
        reported = [parts[name] for parts_of_rank in by_rank for parts in parts_of_rank]
        values = [value for value in reported if value is not None]
        if values:
            metrics.maximum(f"reward/range/{name}", max(values) - min(values))


def _add_group(metrics: Metrics, episodes_G: Sequence[Episode]) -> None:
    rewards = [e.reward for e in episodes_G if e.reward is not None]
    zero_spread = not rewards or max(rewards) - min(rewards) <= SPREAD_TOLERANCE
    metrics.add("groups/zero_spread", zero_spread)
    metrics.add("groups/dead", zero_spread and max(rewards, default=1.0) < HALF_MARKS)
    num_distinct = len({e.completion.token_ids for e in episodes_G})
    metrics.add("groups/distinct_completions", num_distinct / len(episodes_G))
    share_unreadable = fmean(episode.unreadable for episode in episodes_G)
    metrics.add("groups/unreadable", share_unreadable > HALF_UNREADABLE)
    if len(rewards) > 1:
        metrics.add("reward/group_std", pvariance(rewards) ** 0.5)
    for episode in episodes_G:
        _add_episode(metrics, episode)


def add_bare_arm(
    metrics: Metrics, prefix: str, episodes_G: Sequence[Episode], bare: Episode | None
) -> None:
    """Add the bare variant's reward and each episode's gain over it."""
    if bare is None or bare.reward is None:
        return
    metrics.add(f"{prefix}bare_reward", bare.reward)
    for episode in episodes_G:
        if episode.reward is not None:
            metrics.add(f"{prefix}reward_gain", episode.reward - bare.reward)


def _add_episode(metrics: Metrics, episode: Episode) -> None:
    for status in Status:
        metrics.add(f"status/{status.value}", episode.status is status)
    add_unreadable(metrics, "status", episode)
    completion = episode.completion
    metrics.add("tokens/completion_mean", len(completion.token_ids))
    metrics.maximum("tokens/completion_max", len(completion.token_ids))
    metrics.total("tokens/completion_total", len(completion.token_ids))
    metrics.add("tokens/prompt_mean", len(episode.prompt.token_ids))
    metrics.add("tokens/truncated", completion.finish == "length")
    add_thought(metrics, "", episode)
    metrics.add("judge/verdict_mean_s", episode.judge_s or None)  # 0: no judge was asked
    metrics.add("reward/mean", episode.reward)
    metrics.maximum("reward/max", episode.reward)
    for name, value in episode.parts.items():
        metrics.add(f"reward/part/{name}", value)


def add_unreadable(metrics: Metrics, prefix: str, episode: Episode) -> None:
    """Add whether the judge's replies about the episode were unreadable, per category too."""
    category = episode.prompt.sample.category
    for name in ("unreadable", f"unreadable/{category}")[: 2 if category else 1]:
        metrics.add(f"{prefix}/{name}", episode.unreadable)


def add_thought(metrics: Metrics, prefix: str, episode: Episode) -> None:
    """Add the thought's length and whether it was unfinished or lacked its marker."""
    num_tokens = episode.action.num_thought_tokens
    asks_for_thought = episode.prompt.without_thought is not None
    if asks_for_thought or num_tokens:
        metrics.add(f"{prefix}thought/tokens_mean", num_tokens)
        metrics.maximum(f"{prefix}thought/tokens_max", num_tokens)
    if asks_for_thought:
        cause = (episode.action.failure or "").partition(":")[0]
        metrics.add(f"{prefix}thought/unfinished", cause == UNFINISHED_THOUGHT)
        metrics.add(f"{prefix}thought/no_marker", cause == NO_MARKER)
