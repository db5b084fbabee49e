"""Turns a group's episodes into advantages and training sequences.

Axes: `_P` prompts on this rank, `_G` completions in a group.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rl.algorithm.grpo import RewardMoments, group_advantages, reward_moments
from rl.api.policy import Policy
from rl.api.types import Episode, TrainSequence
from rl.config.schema import RunConfig
from rl.ranks.dist import Dist
from rl.seeds import derive_seed


@dataclass(frozen=True, eq=False)
class GradedGroup:
    """One prompt's completions with their rewards and advantages."""

    p: int
    """Number of the prompt on this rank."""
    episodes: Sequence[Episode]
    """_G."""
    advantages: Sequence[float | None]
    """_G; None for an UNGRADED episode."""
    sequences: Sequence[TrainSequence | None]
    """_G; None for an episode that is not in the loss."""


class Advantages:
    """Computes one iteration's advantages. Groups are usually independent; with `advantage_scale:
    'batch_std'` or `shuffle_rewards`, all groups wait until the last one is graded."""

    def __init__(self, config: RunConfig, policy: Policy, iteration: int, dist: Dist) -> None:
        self._config = config
        self._policy = policy
        self._iteration = iteration
        self._dist = dist
        self._waiting: list[tuple[int, Sequence[Episode]]] = []

    def add(self, p: int, episodes_G: Sequence[Episode]) -> Iterator[GradedGroup]:
        """Yields the group, or nothing if it must wait for the other groups."""
        if self._needs_whole_batch:
            self._waiting.append((p, episodes_G))
        else:
            yield self._graded(p, episodes_G, [episode.reward for episode in episodes_G])

    def rest(self) -> Iterator[GradedGroup]:
        """Yields the groups that waited. Collective, to be called when every rank has added all."""
        if not self._needs_whole_batch:
            return
        rewards_PG = [[episode.reward for episode in group] for _, group in self._waiting]
        local_moments = reward_moments(rewards_PG)
        sums = [local_moments.total, local_moments.total_of_squares, local_moments.count]
        batch_moments = RewardMoments(*self._dist.sum_floats(sums))
        if self._config.algorithm.shuffle_rewards:
            seed = derive_seed(self._config.seed, "shuffle", self._iteration)
            rewards_PG = _shuffled(rewards_PG, seed, self._dist)
        for (p, episodes_G), rewards_G in zip(self._waiting, rewards_PG, strict=True):
            yield self._graded(p, episodes_G, rewards_G, batch_moments)

    @property
    def _needs_whole_batch(self) -> bool:
        algorithm = self._config.algorithm
        return algorithm.shuffle_rewards or algorithm.advantage_scale == "batch_std"

    def _graded(
        self,
        p: int,
        episodes_G: Sequence[Episode],
        rewards_G: Sequence[float | None],
        batch: RewardMoments | None = None,
    ) -> GradedGroup:
        algorithm = self._config.algorithm
        advantages_G = group_advantages(
            rewards_G, algorithm.advantage_scale, algorithm.advantage_eps, batch
        )
        sequences_G = train_sequences(
            self._config, self._policy, self._iteration, episodes_G, advantages_G
        )
        mean = fmean([reward for reward in rewards_G if reward is not None] or [0.0])
        marked_G = [
            None if sequence is None or reward is None else replace(sequence, excess=reward - mean)
            for sequence, reward in zip(sequences_G, rewards_G, strict=True)
        ]
        return GradedGroup(p, episodes_G, advantages_G, marked_G)


def train_sequences(
    config: RunConfig,
    policy: Policy,
    iteration: int,
    episodes_G: Sequence[Episode],
    advantages_G: Sequence[float | None],
) -> list[TrainSequence | None]:
    """The training sequence of each of a group's completions; None if it is not in the loss.

    UNGRADED episodes are not in the loss. A group with zero spread is left out or has only its KL
    in the loss, depending on `zero_spread_groups`. Forced tokens, tokens outside
    `policy.loss_mask`, and with `truncated_completions: 'mask'` all tokens of a truncated
    completion are attended to but have no loss.
    """
    algorithm = config.algorithm
    has_spread = any(advantages_G)
    rule = algorithm.zero_spread_groups
    if not has_spread and (rule == "drop" or (rule == "kl_only" and not algorithm.kl_coeff)):
        return [None] * len(episodes_G)
    counted = has_spread or rule == "keep"
    mask_truncated = algorithm.truncated_completions == "mask"
    sequences_G: list[TrainSequence | None] = []
    for episode, advantage in zip(episodes_G, advantages_G, strict=True):
        if advantage is None:
            sequences_G.append(None)
            continue
        completion = episode.completion
        masked = mask_truncated and completion.finish == "length"
        forced = completion.forced or (False,) * len(completion.token_ids)
        mask = policy.loss_mask(completion, iteration)
        loss_mask = tuple(m and not f and not masked for m, f in zip(mask, forced, strict=True))
        sequences_G.append(TrainSequence(loss_mask, advantage, completion.logprobs, counted))
    return sequences_G


def _shuffled(
    rewards_PG: Sequence[Sequence[float | None]], seed: int, dist: Dist
) -> list[list[float | None]]:
    """The control arm: this rank's part of all ranks' rewards in random order."""
    global_PG = [row for rank in dist.gather([list(row) for row in rewards_PG]) for row in rank]
    rewards = [reward for row in global_PG for reward in row]
    random.Random(seed).shuffle(rewards)
    start = dist.rank * len(rewards_PG)
    shuffled_PG: list[list[float | None]] = []
    for row in global_PG:
        shuffled_PG.append(rewards[: len(row)])
        rewards = rewards[len(row) :]
    return shuffled_PG[start : start + len(rewards_PG)]
