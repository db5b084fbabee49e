"""Renders and judges completions of held-out samples as in training, with separate noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from rl.api.types import Completion, Prompt
from rl.console import PhaseTimer
from rl.learner.train_step import Forwards, Inference
from rl.ranks import signals
from rl.rollout.episodes import Interrupted, raise_if_interrupted
from rl.rollout.stream import Rollout, RolloutContext, Sampled, begin
from rl.seeds import derive_seed

if TYPE_CHECKING:
    from rl.learner.learner import Learner
    from rl.ranks.dist import Dist


def score(
    context: RolloutContext,
    prompts_P: Sequence[Prompt],
    completions_PG: Sequence[Sequence[Completion]],
    bare_P: Sequence[Completion | None],
    dist: Dist,
    weights: Callable[[], AbstractContextManager[None]] = nullcontext,
    learner: Learner | None = None,
) -> Rollout:
    """Render and grade completions of this rank's prompts. `weights`: opens a context in which the
    policy has the weights for its states. `learner`: its forward is used, with today's weights.
    Raises `Interrupted` on every rank once any was asked to stop. Collective."""
    context = replace(context, rewards={**context.rewards, **context.held_out_only})
    # The noise depends only on the sample, so that pictures differ only by words and weights.
    noise_P = [derive_seed("evaluation", context.config.seed, p.sample.id) for p in prompts_P]
    ids = [f"evaluation/{prompt.sample.id}" for prompt in prompts_P]
    sampled = Sampled(prompts_P, completions_PG, noise_P, ids, bare_P)
    budget = context.config.optimizer.max_tokens_per_micro_batch
    nums_P = [len(completions_G) for completions_G in completions_PG]
    forwards: Forwards
    if learner is not None:
        forwards = learner.begin(0, prompts_P, sampled.token_ids, nums_P, False)
    else:
        forwards = Inference(
            context.policy, prompts_P, sampled.token_ids, budget, dist, weights, nums_P
        )
    timer = PhaseTimer()  # discarded: the caller's phase includes all of this
    with suppress(Interrupted):
        pending = begin(context, sampled, forwards, timer, signals.stop_received)
        for _ in pending.groups(timer, signals.stop_received):
            pass
    raise_if_interrupted(dist)
    return pending.finished()
