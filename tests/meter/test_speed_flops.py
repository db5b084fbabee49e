"""The policy side of an iteration executes little more than the least that its algorithm takes.

The least, for every group: two forwards over the prompt once and its completions (policy,
reference), one backward, logits of completion tokens only, each picture encoded once. Recomputing
the head's logits in the backward, instead of keeping [N, V] of them, is not part of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_learner
import tiny_policy
import tiny_qwen
import torch

from benchmarks.flop_counter import flop_counter
from rl.learner.learner import Learner
from rl.ranks.dist import Dist

GROUPS, MEMBERS, LORA_RANK = 2, 8, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_qwen.save_policy_folder(tmp_path_factory.mktemp("policy")))


def graded(policy, groups: int) -> list[tiny_learner.Graded]:
    """Groups of eight completions, of a sixth of their prompt's length on average, ragged."""
    members = []
    for group in range(groups):
        prompt = policy.build_prompt(tiny_qwen.sample(group))
        mean = len(prompt.token_ids) // 6
        for g in range(MEMBERS):
            ids = tuple(10 + (7 * g + i) % 200 for i in range(mean - MEMBERS // 2 + g))
            members.append(
                tiny_learner.Graded(
                    prompt, ids, (True,) * len(ids), 1.0 - g / 4, (-5.0,) * len(ids)
                )
            )
    return members


def pairs_of(members: list[tiny_learner.Graded]) -> int:
    """(query, key) pairs that any exact attention has to look at, one by one."""
    pairs = 0
    for prompt in {one.prompt for one in members}:
        pairs += sum(range(1, len(prompt.token_ids) + 1))
    for one in members:
        prompt_len = len(one.prompt.token_ids)
        pairs += sum(prompt_len + i + 1 for i in range(len(one.token_ids)))
    return pairs


def least_flops(policy, members: list[tiny_learner.Graded], full: bool) -> float:
    """Written out for the tiny model: 2 layers, 64 wide, MLPs of 128, 2 heads and 1 of keys, each
    32 wide; LoRA on the four attention matrices."""
    layers, width, mlp, keys = 2, 64, 128, 32
    num_tokens = sum(len(p.token_ids) for p in {one.prompt for one in members})
    num_tokens += (num_completed := sum(len(one.token_ids) for one in members))
    matrices = layers * (2 * width * width + 2 * width * keys + 3 * width * mlp)
    adapters = 0 if full else layers * LORA_RANK * 2 * (2 * width + width + keys)
    vocabulary = policy.module.base_model.config.text_config.vocab_size
    # Policy forward, reference forward, the backward to the inputs, and that to trained matrices.
    products = 2 * matrices * (4 if full else 3) + 2 * adapters * 3
    head = 2 * width * vocabulary * (4 if full else 3)
    attention = 4 * layers * width * (1 + 1 + 2.5)
    return products * num_tokens + head * num_completed + attention * pairs_of(members)


def vision_flops(policy, members: list[tiny_learner.Graded]) -> float:
    """Of each picture once, by the tower alone."""
    pictures = policy.prompts.pictures(list({one.prompt for one in members}))
    with torch.no_grad(), flop_counter() as count:
        for picture in pictures:
            policy.module.base_model.model.visual(picture.pixel_values, grid_thw=picture.grid)
    return count.get_total_flops()


@pytest.mark.parametrize("full", [False, True])
def test_the_policy_side_is_within_a_twentieth_of_the_least(folder, full):
    policy = tiny_policy.make_policy(str(folder), **({"lora": None} if full else {}))
    config = tiny_learner.make_config(
        {"kl_coeff": 0.1}, GROUPS, MEMBERS, max_tokens_per_micro_batch=10_000
    )
    learner = Learner(policy, config, Dist(), tiny_learner.NUM_ITERATIONS)
    members = graded(policy, GROUPS)
    least = least_flops(policy, members, full) + vision_flops(policy, members)
    with flop_counter() as counter:
        tiny_learner.update(learner, members, 0, rollout=True)
    executed = counter.get_total_flops()
    assert least < executed * 1.01
    assert executed / least <= 1.05
