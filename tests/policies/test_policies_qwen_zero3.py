"""Qwen2.5-VL on two ranks of which one has no picture: nobody waits, nothing changes.

A rank that gathers the vision tower alone (ZeRO-3), or reduces its gradient alone (ZeRO-2), hangs
the run: these tests fail by a time limit. Results are held against one process that shards nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_policy
import tiny_qwen
import torch
from test_learner_zero import ADAM_EPS
from test_learner_zero3_ranks import many_pieces
from tiny_policy import Graded, relative_difference, run_ranks, snapshot, update
from tiny_rounding import NATS, STEPPED

from rl.api.policy import PolicySetup
from rl.learner.learner import Learner
from rl.policies.qwen2_5_vl import plug as qwen2_5_vl
from rl.ranks.dist import Dist

pytestmark = pytest.mark.slow

NUM_TOKENS = 6
ONE_GROUP = 60
"""Tokens: two groups never fit."""
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"lora": tiny_policy.LORA},
    "lora-tower": {
        "lora": {**tiny_policy.LORA, "target_modules": ["q_proj", "qkv"]},
        "freeze_vision_tower": False,
    },
    "full": {"lora": None, "freeze_vision_tower": False},
}
"""Tower frozen; tower adapted; everything trained."""
SHARES = {
    "mixed": ((True, False), (False, False)),
    "lonely": ((False, False), (True, True)),
    "texts": ((False, False), (False, False)),
}
"""Which groups of each rank have a picture."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen.save_policy_folder(tmp_path_factory.mktemp("policy"))


def make_learner(folder: str, dist: Dist, kind: str, **optimizer: Any) -> Learner:
    """As in a run without a renderer, where a row may have no picture."""
    section = {"type": "", "model_path": folder, "dtype": "float32", **KINDS[kind]}
    policy = qwen2_5_vl.Qwen25VL(
        qwen2_5_vl.Config(**section),
        PolicySetup(
            "text",
            max_completion_tokens=NUM_TOKENS,
            gradient_checkpointing={"lora": True, "full": "mlp"}.get(kind, False),
        ),
    )
    tiny_policy.wake_lora(policy)
    algorithm = {} if kind == "full" else {"kl_coeff": 0.1}
    settings = {"max_tokens_per_micro_batch": ONE_GROUP, "adam_eps": ADAM_EPS, **optimizer}
    config = tiny_policy.make_config(algorithm, **settings)
    return Learner(policy, config, dist, tiny_policy.NUM_ITERATIONS)


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


def train(learner: Learner, sequences: list[Graded]) -> dict[str, Any]:
    """Two updates; the weights, the log-probs, and how often the vision tower ran."""
    calls: list[int] = []
    visual = learner._policy.module.base_model.model.visual
    visual.register_forward_hook(lambda *_: calls.append(1))
    for iteration in range(2):
        update(learner, sequences, iteration)
    rows = [(s.prompt, s.token_ids) for s in sequences]
    logprobs = learner.logprobs(rows)
    return {"weights": snapshot(learner), "logprobs": logprobs, "calls": len(calls)}


def train_share(
    dist: Dist, out: Path, folder: str, kind: str, shares: str, stage: int
) -> dict[str, Any]:
    with many_pieces():
        learner = make_learner(folder, dist, kind, backend="deepspeed", zero_stage=stage)
        pictured = SHARES[shares][dist.rank]
        return train(learner, sequences_of(learner._policy, pictured, dist.rank))


@pytest.mark.parametrize(
    ("kind", "shares", "stage"),
    [
        ("lora", "mixed", 3),
        ("lora-tower", "lonely", 3),
        ("full", "mixed", 3),
        ("lora", "texts", 3),
        ("lora-tower", "mixed", 2),
        ("full", "mixed", 2),
    ],
)
def test_a_rank_without_pictures(
    folder: str, tmp_path: Path, kind: str, shares: str, stage: int
) -> None:
    ranks = run_ranks(
        train_share, 2, tmp_path, folder=folder, kind=kind, shares=shares, stage=stage
    )
    # Here pictures and texts share a packed row.
    plain = make_learner(folder, Dist(), kind, max_tokens_per_micro_batch=1000)
    both = [
        sequence
        for rank, pictured in enumerate(SHARES[shares])
        for sequence in sequences_of(plain._policy, pictured, rank)
    ]
    expected = train(plain, both)
    assert relative_difference(ranks[0]["weights"], ranks[1]["weights"]) == 0
    assert relative_difference(ranks[0]["weights"], expected["weights"]) <= STEPPED
    logprobs = ranks[0]["logprobs"] + ranks[1]["logprobs"]
    for ours, theirs in zip(logprobs, expected["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=NATS)
    # As often on both ranks; and only where somebody had something to show.
    assert ranks[0]["calls"] == ranks[1]["calls"]
    assert (ranks[0]["calls"] > 0) == (shares != "texts")


def test_without_sharding_a_text_never_runs_the_tower(folder: str) -> None:
    plain = make_learner(folder, Dist(), "lora")
    assert train(plain, sequences_of(plain._policy, (False,), 0))["calls"] == 0
