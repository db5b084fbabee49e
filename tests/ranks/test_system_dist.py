"""Collectives on two real gloo ranks, and without a process group on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_ranks import run_ranks

from rl.algorithm.metrics import Metrics
from rl.engines import vllm as vllm_engine
from rl.ranks.dist import Dist
from rl.tools.trained import pick_device


def collectives() -> dict[str, Any]:
    dist, metrics = Dist.from_env("cpu"), Metrics()
    tensor = torch.tensor([1.0 + dist.rank, 10.0])
    summed = dist.sum_(tensor)
    metrics.add("a", [4.0, 1.0][dist.rank], weight=[1, 3][dist.rank])
    metrics.maximum("b", float(dist.rank))
    results = {
        "main": dist.is_main,
        "summed": tensor.tolist(),
        "in_place": summed is tensor,
        "floats": dist.sum_floats([[0.1, 1e16], [0.2, 1.0]][dist.rank]),
        "max": dist.max_int(5 - dist.rank),
        "any": [dist.any(dist.rank == 1), dist.any(False)],
        "broadcast": dist.broadcast({"from": dist.rank}),
        "gather": dist.gather(f"r{dist.rank}"),
        "reduce": dist.reduce(metrics),
    }
    try:
        dist.sum_floats([1.0] * (1 + dist.rank))
    except ValueError as error:
        results["ragged"] = str(error)
    dist.gather(None)
    dist.close()
    return results


@pytest.mark.slow
def test_two_ranks_get_the_same_results():
    ranks = run_ranks(collectives, 2)
    assert [rank.pop("main") for rank in ranks] == [True, False]
    assert ranks[0] == ranks[1]
    assert ranks[0] == {
        "summed": [3.0, 20.0],
        "in_place": True,
        "floats": [0.1 + 0.2, 1e16],  # the sum is exactly rounded: float64 cannot hold 1e16 + 1
        "max": 5,
        "any": [True, False],
        "broadcast": {"from": 0},
        "gather": ["r0", "r1"],
        "reduce": {"a": (4.0 + 3 * 1.0) / 4, "b": 1.0},
        "ragged": "zip() argument 2 is longer than argument 1",
    }


def test_one_process_needs_no_process_group():
    had_group = torch.distributed.is_initialized()  # another test may have created one
    dist, tensor, metrics = Dist.from_env("cpu"), torch.tensor([2.0]), Metrics()
    metrics.add("a", 3.0)
    assert torch.distributed.is_initialized() == had_group
    assert (dist.rank, dist.world_size, dist.is_main, dist.device) == (0, 1, True, "cpu")
    assert dist.sum_(tensor) is tensor and tensor.item() == 2.0
    assert dist.sum_floats([1.5]) == [1.5]
    assert dist.max_int(4) == 4 and dist.any(True) and not dist.any(False)
    assert dist.broadcast("x") == "x" and dist.gather("x") == ["x"]
    assert dist.reduce(metrics) == {"a": 3.0}
    dist.gather(None)
    dist.close()
    assert torch.distributed.is_initialized() == had_group


def test_incomplete_rank_variables_are_refused(monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"LOCAL_RANK, RANK is not set.*rl train"):
        Dist.from_env("cpu")


def test_on_a_gpu_float32_is_not_replaced_by_tf32(monkeypatch):
    for name, answer in (("is_available", True), ("device_count", 1), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    for pick in (lambda: Dist.from_env().device, pick_device):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
        assert pick() == "cuda:0"
        assert not torch.backends.cudnn.allow_tf32
    assert vllm_engine.ENVIRONMENT["TRITON_F32_DEFAULT"] == "ieee"


@pytest.mark.parametrize("num_devices", [0, 1])
def test_a_missing_cuda_device_is_named(monkeypatch, num_devices):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    with pytest.raises(ValueError, match=f"cuda:1, .* has {num_devices} CUDA devices"):
        Dist.from_env("cuda:1")
