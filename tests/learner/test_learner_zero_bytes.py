"""The bytes that each of two ranks holds under ZeRO: measured, against those of the memory plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_policy
from tiny_learner import NUM_ITERATIONS, make_config, make_sequences, run_ranks, update

from rl.check.memory_plan import PolicyModel, Sizes, plan
from rl.learner import backends
from rl.learner.learner import Learner
from rl.ranks.dist import Dist

pytestmark = pytest.mark.slow

NUM_RANKS = 2
PADDING = 0.02
"""Partitions are padded to equal lengths."""


def measured(dist: Dist, folder: str, stage: int) -> dict[str, int]:
    """The number of trained parameters of a bfloat16 policy without LoRA, and the bytes of this
    rank after an iteration: of optimizer state (float32 weights and moments), and of weights."""
    backends.PERSISTENCE_THRESHOLD_NUMEL = 0  # ZeRO-3 shards even this small model
    policy = tiny_policy.make_policy(folder, lora=None, dtype="bfloat16")
    config = make_config(backend="deepspeed", zero_stage=stage)
    learner = Learner(policy, config, dist, NUM_ITERATIONS)
    update(learner, make_sequences(policy), 0)
    backend: Any = learner._backend
    tensors = [t for parts in backend._adamw.state.values() for t in parts.values()]
    moments = [tensor for tensor in tensors if tensor.numel() > 1]
    parameters = tiny_policy.trainable(policy).values()
    return {
        "num_trained": sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        "state_bytes": sum(t.nbytes for t in (*moments, *backend._flat_masters())),
        "weight_bytes": sum(getattr(p, "ds_tensor", p).nbytes for p in parameters),
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_each_rank_holds_the_bytes_of_the_plan(tmp_path: Path, stage: int) -> None:
    for rank in run_ranks(
        measured, NUM_RANKS, tmp_path, folder=tiny_policy.saved("qwen2_5_vl"), stage=stage
    ):
        gb = planned_gb(rank["num_trained"], stage)
        assert rank["state_bytes"] == pytest.approx(gb["optimizer state"] * 1e9, rel=PADDING)
        assert rank["weight_bytes"] == pytest.approx(gb["policy weights"] * 1e9, rel=PADDING)


def planned_gb(num_params: int, stage: int) -> dict[str, float]:
    """Part of the memory plan -> its GB, for that many trained bfloat16 parameters."""
    model = PolicyModel(1, 8, 8, 1, 1, 8, float(num_params))
    sizes = Sizes(
        model=model, bytes_per_weight=2, lora_rank=None, lora_modules=(), zero_stage=stage,
        world_size=NUM_RANKS, forward_tokens=1, kept_tokens=0, all_kept=True, longest_tokens=1,
        num_completions=1, checkpointing=False, engine=None, reads_reference=False, frozen=(),
    )  # fmt: skip
    return {item.part: item.gb for item in plan(sizes, gpu_gb=80).items}
