"""The whole loop on two ranks, started as a user would: all backends give the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_loop
import torch
from tiny_loop import metrics_of
from tiny_rounding import GRADIENT_TOL, WEIGHT_TOL

SLOW, CAMPAIGN = pytest.mark.slow, pytest.mark.campaign
NUM_ITERATIONS = 2
NEAR = (GRADIENT_TOL, GRADIENT_TOL, 2e-2)
"""Relative tolerance per iteration. The first step differs by rounding, which may change a byte of
a picture; as rewards spread by only 0.003, one byte changed the next gradient by 4e-4 to 1.1e-3
(measured on two CPUs)."""


VLLM = {"type": "vllm", "max_num_seqs": 8}


def launch(models: dict[str, str], folder: Path, num_ranks: int, **optimizer: Any) -> Path:
    """Two iterations; returns the run's folder."""
    config = tiny_loop.config_of(models, folder, num_iterations=NUM_ITERATIONS)
    # Without dropout nothing depends on the ranks' random numbers; a large epsilon keeps Adam from
    # turning the last bit of a small gradient into a whole step.
    config["policy"] |= {"max_prompt_tokens": 256, "lora": {"r": 4, "alpha": 8}}
    config["engine"] = VLLM
    config["optimizer"] |= {"adam_eps": 1e-4, **optimizer}
    with tiny_loop.listening() as addresses:
        ended = tiny_loop.launch(tiny_loop.write_config(folder, config), num_ranks)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    # The judge, vLLM and the process groups; the run warns of others.
    assert addresses == {"127.0.0.1"} and "listens on" not in ended.stderr
    logs = folder / "tiny" / "logs"
    assert [log.name for log in logs.glob("judge_*")] == ["judge_0.log"]  # a node's ranks share it
    return folder / "tiny"


def episodes_of(run_dir: Path, iteration: int, rank: int) -> list[dict[str, Any]]:
    return tiny_loop.rows_of(run_dir / "episodes" / f"it_{iteration:06d}.rank{rank}.jsonl")


@pytest.mark.parametrize(
    ("zero_stage", "is_compared"),
    [
        pytest.param(2, True, marks=CAMPAIGN),
        pytest.param(3, True, marks=CAMPAIGN),
        pytest.param(3, False, marks=SLOW),
    ],
)
def test_two_ranks_with_zero_give_the_numbers_of_plain_torch(
    models: dict[str, str], tmp_path: Path, zero_stage: int, is_compared: bool
) -> None:
    """And all ranks have the same weights, which only the slow test checks alone."""
    sharded = launch(models, tmp_path / "sharded", 2, backend="deepspeed", zero_stage=zero_stage)
    rows = metrics_of(sharded)
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert all(row["sync/mean_abs_dlogp"] < 1e-4 for row in rows), "the engine has them, too"
    for row in rows[1:]:
        assert row["optimizer/steps"] == 1 and row["optimizer/grad_norm"] > 0
    one, other = (torch.load(sharded / f"weights_2.rank{rank}.pt") for rank in range(2))
    for note in (one, other):
        assert note["version"] == 2 and (note["sharded"] > 0) == (zero_stage == 3)
    torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=0)
    for iteration in range(NUM_ITERATIONS):
        for rank in range(2):
            episodes = episodes_of(sharded, iteration + 1, rank)
            assert [e["group_id"] for e in episodes] == [f"{iteration}/{rank}"] * 4
    logs = "".join(path.read_text() for path in (sharded / "logs").iterdir())
    assert "accelerator" not in logs.lower(), logs
    if not is_compared:
        return

    plain = launch(models, tmp_path / "plain", 2, backend="torch")
    alone = launch(models, tmp_path / "alone", 1, backend="torch")
    for row, plain_row, near in zip(rows, metrics_of(plain), NEAR, strict=True):
        assert row.keys() == plain_row.keys()
        for name, value in plain_row.items():
            # A correlation over a few small groups changes most with the pictures' rounding.
            rel = 0.1 if name.startswith("reward/correlation/") else near
            assert row[name] == pytest.approx(value, rel=rel, abs=WEIGHT_TOL), name
    # Sampling on one rank does not depend on the others: one rank alone writes the same tokens.
    both = episodes_of(sharded, 1, 0) + episodes_of(sharded, 1, 1)
    for episode, expected in zip(both, episodes_of(alone, 1, 0), strict=True):
        for key in ("group_id", "sample_id", "noise_seed", "token_ids"):
            assert episode[key] == expected[key], key
    assert metrics_of(alone)[1]["reward/mean"] == pytest.approx(rows[1]["reward/mean"], abs=1e-5)


@pytest.mark.parametrize(
    ("trouble", "max_staleness", "optimizer"),
    [
        pytest.param("refused", 0, {"backend": "deepspeed", "zero_stage": 2}, marks=CAMPAIGN),
        pytest.param("refused", 1, {"backend": "torch"}, marks=SLOW),
        pytest.param("raised", 0, {"backend": "deepspeed", "zero_stage": 2}, marks=CAMPAIGN),
        pytest.param("killed", 0, {"backend": "deepspeed", "zero_stage": 3}, marks=CAMPAIGN),
        pytest.param("stopped", 0, {"backend": "deepspeed", "zero_stage": 2}, marks=SLOW),
        pytest.param("stopped", 1, {"backend": "deepspeed", "zero_stage": 1}, marks=CAMPAIGN),
    ],
)
def test_a_failure_or_stop_of_one_rank_ends_all_ranks(
    models: dict[str, str],
    tmp_path: Path,
    trouble: str,
    max_staleness: int,
    optimizer: dict[str, Any],
) -> None:
    """In the second iteration the last rank's judge refuses, or the rank fails, is killed or is
    asked to stop (with `max_staleness: 1` the first has not been learnt from by then). Finished
    work is saved once, and no rank waits."""
    config = tiny_loop.without_judge(
        models,
        tmp_path,
        num_iterations=3,
        prompts_per_iteration=4,
        max_staleness=max_staleness,
        checkpoint={"save_every_n_iterations": 3},
    )
    config["optimizer"] |= optimizer
    if optimizer.get("zero_stage") == 3:  # only vLLM samples while the weights are sharded
        config["policy"] |= {"max_prompt_tokens": 256}
        config["engine"] = VLLM
    ended = tiny_loop.launch(tiny_loop.write_config(tmp_path, config), 2, TROUBLE=trouble)
    saved = tiny_loop.saved_in(tmp_path / "tiny")
    if trouble != "stopped":
        messages = {
            "refused": "the key has expired",
            "raised": "injected; lower optimizer.max_tokens_per_micro_batch",
            "killed": "rank 1 was killed by SIGKILL",
        }
        assert ended.returncode != 0 and messages[trouble] in ended.stderr + ended.stdout
        assert "rank 1 failed" in ended.stderr
        assert saved == ["step_000001"]
    else:
        assert ended.returncode == 0, ended.stderr[-2000:]
        done = 0 if max_staleness else 1
        assert f"stopped after {done} iterations" in ended.stdout
        assert saved == [f"step_{done:06d}"]
