"""Qwen-VL on two ranks, one of them without pictures, has the results of one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_policy
import tiny_qwen
import tiny_qwen3
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

from rl.api.policy import PolicySetup
from rl.learner.learner import Learner
from rl.policies.qwen_vl import Qwen3VL, Qwen25VL, QwenVL
from rl.ranks.dist import Dist

pytestmark = pytest.mark.slow
RARE = pytest.mark.campaign

FAMILIES = {"qwen2_5_vl": tiny_qwen, "qwen3_vl": tiny_qwen3}
NUM_TOKENS = 6
ONE_GROUP = 60
"""A token budget that fits one group but not two."""
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"lora": tiny_policy.LORA},
    "lora-tower": {
        "lora": {**tiny_policy.LORA, "target_modules": ["q_proj", "qkv"]},
        "freeze_vision_tower": False,
    },
    "full": {"lora": None, "freeze_vision_tower": False},
}
"""LoRA with a frozen tower; LoRA in the tower, too; everything trained."""
SHARES = {
    "mixed": ((True, False), (False, False)),
    "lonely": ((False, False), (True, True)),
    "texts": ((False, False), (False, False)),
}
"""Which groups of each rank have a picture."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        name: family.save_policy_folder(tmp_path_factory.mktemp(name))
        for name, family in FAMILIES.items()
    }


def make_policy(folder: str, kind: str, adapter: str = "") -> QwenVL:
    """The policy of a folder, by `model_type`; it serves no renderer, so pictures are optional."""
    section = {"type": "", "model_path": folder, "dtype": "float32", **KINDS[kind]}
    section["adapter_path"] = adapter
    is_qwen3 = json.loads(Path(folder, "config.json").read_text())["model_type"] == "qwen3_vl"
    plugin: type[QwenVL] = Qwen3VL if is_qwen3 else Qwen25VL
    policy = plugin(
        plugin.Config(**section),
        PolicySetup(
            "text",
            state_kind="pre_norm" if is_qwen3 else "post_norm",
            max_completion_tokens=NUM_TOKENS,
            gradient_checkpointing={"lora": True, "full": "mlp"}.get(kind, False),
            keeps_start=bool(adapter),
        ),
    )
    if not adapter:
        tiny_policy.randomize_lora_b(policy)
    return policy


def make_learner(policy: Any, dist: Dist, kind: str, **optimizer: Any) -> Learner:
    algorithm = {} if kind == "full" else {"kl_coeff": 0.1}
    settings = {"max_tokens_per_micro_batch": ONE_GROUP, "adam_eps": ADAM_EPS, **optimizer}
    config = make_config(algorithm, **settings)
    return Learner(policy, config, dist, NUM_ITERATIONS)


def sequences_of(policy: Any, pictured: tuple[bool, ...], seed: int) -> list[Graded]:
    """Groups of two completions each."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for number, has_picture in enumerate(pictured):
        sample = tiny_qwen.sample(10 * seed + number)
        prompt = policy.build_prompt(sample if has_picture else replace(sample, sources=()))
        assert bool(prompt.images) == has_picture
        for advantage in (1.0, -1.0):
            ids = torch.randint(10, 250, (NUM_TOKENS,), generator=generator)
            sequences.append(
                Graded(
                    prompt=prompt,
                    token_ids=tuple(ids.tolist()),
                    loss_mask=(True,) * NUM_TOKENS,
                    advantage=advantage,
                    sampler_logprobs=(-6.0,) * NUM_TOKENS,
                )
            )
    return sequences


def tower_calls(policy: Any) -> list[int]:
    """A list that grows by one with every later call of the vision tower."""
    calls: list[int] = []
    visual = policy.module.base_model.model.visual
    visual.register_forward_hook(lambda *_: calls.append(1))
    return calls


def train(learner: Learner, sequences: list[Graded]) -> dict[str, Any]:
    """Makes two updates; returns the weights and the log-probs."""
    for iteration in range(2):
        update(learner, sequences, iteration)
    rows = [(s.prompt, s.token_ids) for s in sequences]
    logprobs = learner.logprobs(rows)
    return {"weights": snapshot(learner), "logprobs": logprobs}


def train_share(
    dist: Dist, out: Path, folder: str, kind: str, shares: str, stage: int
) -> dict[str, Any]:
    with small_shards_and_chunks():
        policy = make_policy(folder, kind)
        learner = make_learner(policy, dist, kind, backend="deepspeed", zero_stage=stage)
        calls = tower_calls(policy)
        result = train(learner, sequences_of(policy, SHARES[shares][dist.rank], dist.rank))
        return {**result, "calls": len(calls)}


@pytest.mark.parametrize(
    ("family", "kind", "shares", "stage"),
    [
        ("qwen2_5_vl", "lora", "mixed", 3),
        ("qwen2_5_vl", "lora-tower", "mixed", 2),
        ("qwen3_vl", "lora-tower", "lonely", 3),
        ("qwen3_vl", "full", "mixed", 3),
        pytest.param("qwen2_5_vl", "lora", "texts", 3, marks=RARE),
        pytest.param("qwen2_5_vl", "lora-tower", "lonely", 3, marks=RARE),
        pytest.param("qwen2_5_vl", "full", "mixed", 2, marks=RARE),
        pytest.param("qwen2_5_vl", "full", "mixed", 3, marks=RARE),
        pytest.param("qwen3_vl", "lora", "mixed", 3, marks=RARE),
        pytest.param("qwen3_vl", "full", "mixed", 2, marks=RARE),
    ],
)
def test_a_rank_without_pictures_trains_with_one_that_has_some(
    folders: dict[str, str], tmp_path: Path, family: str, kind: str, shares: str, stage: int
) -> None:
    """Qwen3-VL has deepstack features and pre-norm states."""
    folder = folders[family]
    ranks = run_ranks(
        train_share, 2, tmp_path, folder=folder, kind=kind, shares=shares, stage=stage
    )
    # In one process, prompts with and without pictures share a packed row.
    policy = make_policy(folder, kind)
    plain = make_learner(policy, Dist(), kind, max_tokens_per_micro_batch=1000)
    groups = [sequences_of(policy, pictured, rank) for rank, pictured in enumerate(SHARES[shares])]
    assert_as_one_process(ranks, plain, groups)
    # The tower runs equally often on both ranks, and only if a rank has pictures.
    assert ranks[0]["calls"] == ranks[1]["calls"]
    assert (ranks[0]["calls"] > 0) == (shares != "texts")


def test_without_sharding_a_text_prompt_never_runs_the_tower(folders: dict[str, str]) -> None:
    policy = make_policy(folders["qwen2_5_vl"], "lora")
    calls = tower_calls(policy)
    train(make_learner(policy, Dist(), "lora"), sequences_of(policy, (False,), 0))
    assert not calls


def references(dist: Dist, out: Path, folder: str, adapter: str, stage: int) -> list[Any]:
    """Log-probs of the policy and of its reference, before and after two updates."""
    with small_shards_and_chunks():
        policy = make_policy(folder, "lora", adapter)
        learner = make_learner(policy, dist, "lora", backend="deepspeed", zero_stage=stage)
        sequences = sequences_of(policy, (False, False), dist.rank)
        rows = [(s.prompt, s.token_ids) for s in sequences]

        def both() -> list[Any]:
            with policy.reference():
                reference = learner.logprobs(rows)
            return [learner.logprobs(rows), reference]

        return [*both(), *train(learner, sequences).values(), *both()]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_sharded_adapter_has_the_start_as_reference(
    folders: dict[str, str], tmp_path: Path, stage: int
) -> None:
    first = make_policy(folders["qwen2_5_vl"], "lora")
    first.save_pretrained(str(tmp_path), tiny_policy.trainable(first))
    for rank in run_ranks(
        references, 2, tmp_path, folder=folders["qwen2_5_vl"], adapter=str(tmp_path), stage=stage
    ):
        start, reference, _, trained, after, reference_after = rank
        assert start == reference == reference_after, "to the bit, also where shards were written"
        assert after == trained != start
