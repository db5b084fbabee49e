"""ZeRO-3 on two ranks with unequal work gives the results of one process, without a hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_emu3
import tiny_policy
import tiny_qwen
import torch
from tiny_learner import (
    ADAM_EPS,
    NUM_ITERATIONS,
    Graded,
    assert_as_one_process,
    make_config,
    run_ranks,
    small_shards_and_chunks,
    snapshot,
    update,
)

from rl.learner.learner import Learner
from rl.policies.emu3 import Emu3
from rl.ranks.dist import Dist

pytestmark = pytest.mark.slow

SHORT, LONG = 3, 40
"""Tokens per completion; three completions have 5 chunks on one rank and 60 on the other."""
ONE_GROUP = 250
"""A token budget that fits one group."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen.save_policy_folder(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def emu3_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_emu3.save_policy_folder(tmp_path_factory.mktemp("emu3"))


def sequences_of(policy: Any, rank: int) -> list[Graded]:
    """A group of three completions of equal length: long on rank 0, short on rank 1; for Emu3,
    pictures of 16 codes on rank 0 and one word on rank 1."""
    if isinstance(policy, Emu3):
        prompt = policy.build_prompt(tiny_emu3.sample(rank))
        codes_G = [tiny_emu3.codes(10 * rank + g) for g in range(3)]
        words, write = policy.encode_completion("blue").token_ids, policy.prompts.picture_completion
        ids_G = [words if rank else write(codes) for codes in codes_G]
    else:
        prompt = policy.build_prompt(tiny_qwen.sample(rank))
        generator, size = torch.Generator().manual_seed(rank), ((LONG, SHORT)[rank],)
        drawn_G = [torch.randint(10, 250, size, generator=generator) for _ in range(3)]
        ids_G = [tuple(ids.tolist()) for ids in drawn_G]
    return [
        Graded(prompt, ids, (True,) * len(ids), advantage, (-6.0,) * len(ids))
        for ids, advantage in zip(ids_G, (1.0, -0.5, -0.5), strict=True)
    ]


def policy_of(folder: str, full: bool) -> Any:
    section = {"lora": None} if full else {}
    if "emu3" not in folder:
        return tiny_policy.make_policy(folder, **section)
    section = section or {"lora": {"r": 4, "alpha": 8}}
    policy = tiny_policy.make_emu3(folder, checkpointing=True, **section)
    tiny_policy.randomize_lora_b(policy)
    return policy


def learner_of(policy: Any, dist: Dist, full: bool, **optimizer: Any) -> Learner:
    """A learner of LoRA with a KL term or, if `full`, of all weights, the head included."""
    settings = {"max_tokens_per_micro_batch": ONE_GROUP, "adam_eps": ADAM_EPS, **optimizer}
    config = make_config({} if full else {"kl_coeff": 0.1}, **settings)
    return Learner(policy, config, dist, NUM_ITERATIONS)


def train_uneven(dist: Dist, out: Path, folder: str, full: bool) -> dict[str, Any]:
    with small_shards_and_chunks():
        policy = policy_of(folder, full)
        learner = learner_of(policy, dist, full, backend="deepspeed", zero_stage=3)
        head, calls = policy.module.base_model.lm_head, []
        head.register_forward_hook(lambda _module, _args, output: calls.append(output.shape))
        mine = sequences_of(policy, dist.rank)
        for iteration in range(2):
            update(learner, mine, iteration)
        rows = [(s.prompt, s.token_ids) for s in mine]
        return {"weights": snapshot(learner), "calls": calls, "logprobs": learner.logprobs(rows)}


def head_calls(folder: str, tmp_path: Path, full: bool) -> list[list[tuple[int, int]]]:
    """Compares two ranks with one process; returns (tokens, ids) of each head call by rank."""
    ranks = run_ranks(train_uneven, 2, tmp_path, folder=folder, full=full)
    policy = policy_of(folder, full)
    plain = learner_of(policy, Dist(), full)
    assert_as_one_process(ranks, plain, [sequences_of(policy, rank) for rank in range(2)])
    return [rank["calls"] for rank in ranks]


@pytest.mark.parametrize("full", [False, True])
def test_ranks_may_differ_in_completion_length(folder: str, tmp_path: Path, full: bool) -> None:
    """Both ranks call the head equally often; the last calls of the short rank have no tokens."""
    long, short = ([n for n, _ in calls] for calls in head_calls(folder, tmp_path, full))
    assert len(long) == len(short)
    assert short.count(0) > 0 and long.count(0) == 0


@pytest.mark.parametrize("full", [False, True])
def test_one_rank_may_have_pictures_and_the_other_words(
    emu3_folder: str, tmp_path: Path, full: bool
) -> None:
    """Both ranks make the same head calls, slice by slice; words have none in the visual slice."""
    pictures, words = head_calls(emu3_folder, tmp_path, full)
    assert [width for _, width in pictures] == [width for _, width in words]
    assert {width for _, width in words} == {528, 64}
    assert not any(num_tokens for num_tokens, width in words if width == 64)
