"""The policy side of an iteration executes at most 5 % more than the fewest possible FLOPs.

The fewest, per group: two forwards (policy, reference) over the prompt, once, and its completions;
one backward; logits of completion tokens only; each picture encoded once. Not included: recomputing
the head's logits in the backward, which saves keeping [N, V] of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny_learner
import tiny_policy
import tiny_qwen
import torch

from benchmarks.flop_counter import flop_counter
from rl.learner.learner import NUM_MEASURED, Learner
from rl.meter import prefix_tree_pairs
from rl.ranks.dist import Dist

GROUPS, MEMBERS = 2, 8


def graded(policy, groups: int) -> list[tiny_learner.Graded]:
    """Groups of eight completions of different length, on average a sixth of the prompt."""
    members = []
    for group in range(groups):
        prompt = policy.build_prompt(tiny_qwen.sample(group))
        mean = len(prompt.token_ids) // 6
        for g in range(MEMBERS):
            ids = tuple(10 + (7 * g + i) % 200 for i in range(mean - MEMBERS // 2 + g))
            rest = ((True,) * len(ids), 1.0 - g / 4, (-5.0,) * len(ids))
            members.append(tiny_learner.Graded(prompt, ids, *rest))
    return members


def least_flops(policy, members: list[tiny_learner.Graded]) -> float:
    """By the formulas that `test_system_work.py` compares with a real model."""
    least = 0.0
    sizes = replace(policy.module.sizes, lora_rank=0)  # the reference runs without the adapter
    for prompt in {one.prompt for one in members}:
        prompt_len = len(prompt.token_ids)
        lens = [len(one.token_ids) for one in members if one.prompt is prompt]
        least += policy.train_flops(prompt_len, lens) + sizes.head_flops(sum(lens))
        least += sizes.forward_flops(prompt_len + sum(lens), prefix_tree_pairs(prompt_len, lens))
    return least


def vision_flops(policy, members: list[tiny_learner.Graded]) -> float:
    """FLOPs of the vision tower for each picture once."""
    pictures = policy.prompts.pictures(list({one.prompt for one in members}))
    with torch.no_grad(), flop_counter() as count:
        for picture in pictures:
            policy.module.base_model.model.visual(picture.pixel_values, grid_thw=picture.grid)
    return count.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True])
def test_the_policy_side_is_within_5_percent_of_the_fewest_flops(full):
    policy = tiny_policy.make_policy(**({"lora": None} if full else {}))
    config = tiny_learner.make_config(
        {"kl_coeff": 0.1}, GROUPS, MEMBERS, max_tokens_per_micro_batch=10_000
    )
    learner = Learner(policy, config, Dist(), tiny_learner.NUM_ITERATIONS)
    members = graded(policy, GROUPS)
    least = least_flops(policy, members) + vision_flops(policy, members)
    with flop_counter() as counter:
        tiny_learner.update(learner, members, NUM_MEASURED, rollout=True)
    executed = counter.get_total_flops()
    assert least <= executed
    assert executed / least <= 1.05
