"""ZeRO on two ranks with unequal work gives the results of one process, without a hang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_emu3
import tiny_qwen
import torch
from tiny_calls import calls_of, pictures_read
from tiny_learner import (
    ADAM_EPS,
    NUM_ITERATIONS,
    Graded,
    assert_as_one_process,
    make_config,
    run_ranks,
    small_shards_and_chunks,
    snapshot,
    train,
)
from tiny_policy import LORA, make, randomize_lora_b, saved, trainable

from rl.learner.learner import Learner
from rl.policies.emu3 import Emu3
from rl.ranks.dist import Dist

pytestmark = pytest.mark.slow
RARE = pytest.mark.campaign

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"lora": LORA, "gradient_checkpointing": True},
    "lora-tower": {
        "lora": {**LORA, "target_modules": ["q_proj", "qkv"]},
        "freeze_vision_tower": False,
    },
    "full": {"lora": None, "gradient_checkpointing": "mlp"},
    "full-tower": {"lora": None, "freeze_vision_tower": False, "gradient_checkpointing": "mlp"},
}
"""LoRA with a frozen tower; LoRA in the tower, too; all trained but the tower; everything."""
SHARES = {
    "mixed": (((True, 6), (False, 6)), ((False, 6), (False, 6))),
    "lonely": (((False, 6), (False, 6)), ((True, 6), (True, 6))),
    "texts": (((False, 6), (False, 6)), ((False, 6), (False, 6))),
    "lengths": (((True, 40),), ((True, 3),)),
    "pictures or words": (((True, 0),), ((True, 0),)),
}
"""For each group of each rank: whether its prompt has a picture, and the length of its two
completions. The completions of an Emu3 are pictures of 16 codes on rank 0 and a word on rank 1."""


def policy_of(folder: str, kind: str, **section: Any) -> Any:
    """The policy of a folder; a Qwen serves no renderer, so that pictures are optional."""
    section = KINDS[kind] | section
    config = Path(folder, "config.json").read_text()
    if "qwen" in config:
        section |= {"kind": "text", "template": None, "temperature": 1.0}
    if "qwen3" in config:
        section["state_kind"] = "pre_norm"
    policy = make(folder, **section)
    if "adapter_path" not in section:
        randomize_lora_b(policy)
    return policy


def learner_of(policy: Any, dist: Dist, kind: str, **optimizer: Any) -> Learner:
    """A learner of LoRA with a KL term or of all weights, the head included."""
    algorithm = {} if "full" in kind else {"kl_coeff": 0.1}
    # One group fits into a micro-batch, but two do not.
    settings = {"max_tokens_per_micro_batch": 60, "adam_eps": ADAM_EPS, **optimizer}
    return Learner(policy, make_config(algorithm, **settings), dist, NUM_ITERATIONS)


def sequences_of(policy: Any, shares: str, rank: int) -> list[Graded]:
    generator = torch.Generator().manual_seed(rank)
    sequences = []
    for number, (has_picture, num_tokens) in enumerate(SHARES[shares][rank]):
        if isinstance(policy, Emu3):
            prompt = policy.build_prompt(tiny_emu3.sample(rank))
            words, write = policy.encode_completion("blue"), policy.prompts.picture_completion
            ids_G = [words.token_ids if rank else write(tiny_emu3.codes(g)) for g in range(2)]
        else:
            sample = tiny_qwen.sample(10 * rank + number)
            prompt = policy.build_prompt(sample if has_picture else replace(sample, sources=()))
            assert bool(prompt.images) == has_picture
            ids_G = torch.randint(10, 250, (2, num_tokens), generator=generator).tolist()
        sequences += [
            Graded(prompt, tuple(ids), (True,) * len(ids), advantage, (-6.0,) * len(ids))
            for ids, advantage in zip(ids_G, (1.0, -1.0), strict=True)
        ]
    return sequences


def trained(learner: Learner, sequences: list[Graded]) -> dict[str, Any]:
    """Makes two updates; returns the weights and the log-probs."""
    train(learner, sequences, 0, 2)
    logprobs = learner.logprobs([(s.prompt, s.token_ids) for s in sequences])
    return {"weights": snapshot(learner), "logprobs": logprobs}


def train_share(dist: Dist, folder: str, kind: str, shares: str, stage: int) -> dict[str, Any]:
    with small_shards_and_chunks():
        policy = policy_of(folder, kind)
        learner = learner_of(policy, dist, kind, backend="deepspeed", zero_stage=stage)
        head = calls_of(policy.module.base_model.lm_head, lambda _args, _kwargs, out: out.shape)
        read = [] if isinstance(policy, Emu3) else pictures_read(policy)
        result = trained(learner, sequences_of(policy, shares, dist.rank))
        return {**result, "head": head, "read": read}


@pytest.mark.parametrize(
    ("family", "kind", "shares", "stage"),
    [
        ("qwen2_5_vl", "lora", "lengths", 3),
        ("qwen2_5_vl", "full", "lengths", 3),
        ("emu3", "lora", "pictures or words", 3),
        ("emu3", "full", "pictures or words", 3),
        ("qwen2_5_vl", "lora", "mixed", 3),
        ("qwen2_5_vl", "lora-tower", "mixed", 2),
        ("qwen3_vl", "lora-tower", "lonely", 3),
        ("qwen3_vl", "full-tower", "mixed", 3),
        pytest.param("qwen2_5_vl", "lora", "texts", 3, marks=RARE),
        pytest.param("qwen2_5_vl", "lora-tower", "lonely", 3, marks=RARE),
        pytest.param("qwen2_5_vl", "full-tower", "mixed", 2, marks=RARE),
        pytest.param("qwen2_5_vl", "full-tower", "mixed", 3, marks=RARE),
        pytest.param("qwen3_vl", "lora", "mixed", 3, marks=RARE),
        pytest.param("qwen3_vl", "full-tower", "mixed", 2, marks=RARE),
    ],
)
def test_ranks_with_unequal_work_train_as_one_process(
    tmp_path: Path, family: str, kind: str, shares: str, stage: int
) -> None:
    """Qwen3-VL has deepstack features and pre-norm states."""
    folder = saved(family)
    ranks = run_ranks(
        train_share, 2, tmp_path, folder=folder, kind=kind, shares=shares, stage=stage
    )
    # In one process, prompts with and without pictures share a packed row.
    policy = policy_of(folder, kind)
    plain = learner_of(policy, Dist(), kind, max_tokens_per_micro_batch=1000)
    assert_as_one_process(ranks, plain, [sequences_of(policy, shares, rank) for rank in range(2)])
    # The tower runs equally often on both ranks, and only if a rank has pictures.
    read, other = (rank["read"] for rank in ranks)
    assert len(read) == len(other)
    assert bool(read) == (family != "emu3" and shares != "texts")
    # Both ranks make the same calls of the head, slice by slice, some of them without tokens.
    long, short = ([num_tokens for num_tokens, _ in rank["head"]] for rank in ranks)
    widths, other_widths = ([width for _, width in rank["head"]] for rank in ranks)
    assert widths == other_widths
    if shares == "lengths":
        assert short.count(0) > 0 and long.count(0) == 0
    if family == "emu3":
        assert set(widths) == {528, 64}
        assert {n for n, width in zip(short, widths, strict=True) if width == 64} == {0}


def test_without_sharding_a_text_prompt_never_runs_the_tower() -> None:
    policy = policy_of(saved("qwen2_5_vl"), "lora")
    read = pictures_read(policy)
    trained(learner_of(policy, Dist(), "lora"), sequences_of(policy, "texts", 0))
    assert not read


def references(dist: Dist, folder: str, adapter: str, stage: int) -> list[Any]:
    """Log-probs of the policy and of its reference, before and after two updates."""
    with small_shards_and_chunks():
        policy = policy_of(folder, "lora", adapter_path=adapter, keeps_start=True)
        learner = learner_of(policy, dist, "lora", backend="deepspeed", zero_stage=stage)
        sequences = sequences_of(policy, "texts", dist.rank)
        rows = [(s.prompt, s.token_ids) for s in sequences]

        def both() -> list[Any]:
            with policy.reference():
                reference = learner.logprobs(rows)
            return [learner.logprobs(rows), reference]

        return [*both(), trained(learner, sequences)["logprobs"], *both()]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_sharded_adapter_has_the_start_as_reference(tmp_path: Path, stage: int) -> None:
    folder = saved("qwen2_5_vl")
    first = policy_of(folder, "lora")
    first.save_pretrained(str(tmp_path), trainable(first))
    for start, reference, trained, after, reference_after in run_ranks(
        references, 2, tmp_path, folder=folder, adapter=str(tmp_path), stage=stage
    ):
        assert start == reference == reference_after, "to the bit, also where shards were written"
        assert after == trained != start
