"""Where models may lie, in words; the pure half needs no device, the other half a stand-in."""

from __future__ import annotations

import pytest
import torch
from tiny_messages import names

from rl.api.plug import PlacedConfig, PlugConfig
from rl.ranks import placement
from rl.ranks.placement import Claim, Machine, problems, resolve_device

FOUR_GPUS = Machine(cuda_gb=(80.0, 80.0, 80.0, 24.0))
THREE = [Claim("policy", "auto"), Claim("renderer", "cuda:1"), Claim("rewards.clip", "cuda:2")]


@pytest.mark.parametrize(
    ("asked", "own", "device"),
    [
        ("auto", "cuda:3", "cuda:3"),
        ("auto", "cpu", "cpu"),
        ("cpu", "cuda:3", "cpu"),
        ("cuda:1", "cuda:3", "cuda:1"),
        ("cuda:+2", "cuda:3", "cuda:5"),
        ("cuda:+0", "cuda:3", "cuda:3"),
    ],
)
def test_words_become_devices(asked: str, own: str, device: str) -> None:
    assert resolve_device(asked, own) == device


def test_counting_from_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="which is cpu"):
        resolve_device("cuda:+1", "cpu")
    (problem,) = problems([Claim("renderer", "cuda:+1")], ["cpu"], None)
    assert problem.startswith("renderer.device: 'cuda:+1' ")


@pytest.mark.parametrize(
    "typo", ["gpu", "cuda", "cuda:", "cuda:-1", "cuda:one", "cuda:+", "", "Cpu"]
)
def test_words_that_are_no_device(typo: str) -> None:
    (problem,) = problems([Claim("renderer", typo)], ["cuda:0"], None)
    assert names(problem, f"renderer.device: {typo!r} ... 'auto'")


@pytest.mark.parametrize(
    ("device", "owns", "machine", "said"),
    [
        ("cuda:7", ["cuda:0"], FOUR_GPUS, "'cuda:7' ... 4 CUDA devices ... 'cuda:0' to 'cuda:3'"),
        ("cuda:0", ["cpu"], Machine(), "0 CUDA devices ... 'auto' or 'cpu'"),
        ("cuda:+4", ["cuda:0"], FOUR_GPUS, "'cuda:+4' ... cuda:4"),
    ],
)
def test_a_device_that_is_not_there(
    device: str, owns: list[str], machine: Machine, said: str
) -> None:
    (problem,) = problems([Claim("renderer", device)], owns, machine)
    assert problem.startswith("renderer.device: ") and names(problem, said)
    assert problems([Claim("renderer", device)], ["cuda:0"], None) == []


def test_two_ranks_never_share_a_device_unseen() -> None:
    ranks = ["cuda:0", "cuda:1"]
    found = problems(THREE, ranks, FOUR_GPUS)
    keys = ["renderer.device", "rewards.clip.device"]
    assert [problem.split(":")[0] for problem in found] == keys
    assert names(found[0], "'cuda:1' ... ranks 0, 1 on cuda:1 ... 'cuda:+2'")


def test_a_neighbours_own_device_counts_as_shared() -> None:
    claims = [Claim("policy", "auto"), Claim("renderer", "cuda:+1")]
    (problem,) = problems(claims, ["cuda:0", "cuda:1"], FOUR_GPUS)
    assert "ranks 0, 1 on cuda:1" in problem
    behind = [Claim("policy", "auto"), Claim("renderer", "cuda:+2")]
    assert problems(behind, ["cuda:0", "cuda:1"], FOUR_GPUS) == []


def test_limits_add_up_per_device() -> None:
    claims = [
        Claim("policy", "auto"),
        Claim("renderer", "cuda:1", 30.0),
        Claim("rewards.clip", "cuda:1", 2.5),
        Claim("rewards.other", "cpu", 4.0),
    ]
    assert problems(claims, ["cuda:0"], FOUR_GPUS) == []
    assert placement.limits_gb(claims, "cuda:0") == {"cuda:1": 32.5}


def test_a_limit_that_cannot_be_kept_is_refused() -> None:
    beside_free = [Claim("policy", "auto"), Claim("renderer", "auto", 30.0)]
    (problem,) = problems(beside_free, ["cuda:0"], FOUR_GPUS)
    assert names(problem, "renderer.max_memory_gb: ... cuda:0 ... policy")
    assert problems(beside_free, ["cpu"], Machine()) == []
    too_large = [Claim("renderer", "cuda:3", 20.0), Claim("rewards.clip", "cuda:3", 5.0)]
    (problem,) = problems(too_large, ["cuda:0"], FOUR_GPUS)
    assert names(problem, "25 GB on cuda:3 ... 24")


def test_claims_come_from_the_sections_that_place_a_model() -> None:
    placed = PlacedConfig(device="cuda:1", max_memory_gb=3.0)
    sections = [("policy", PlacedConfig()), ("renderer", placed), ("rewards.x", PlugConfig())]
    assert placement.claims_of(sections) == [
        Claim("policy", "auto"),
        Claim("renderer", "cuda:1", 3.0),
    ]
    assert placement.describe(placement.claims_of(sections)) == [
        "policy               the rank's own device",
        "renderer             cuda:1, at most 3 GB",
    ]


def test_ranks_of_this_machine_come_from_the_launcher() -> None:
    two = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert placement.own_devices("cuda:1", two) == ["cuda:0", "cuda:1"]
    assert placement.own_devices("cpu", two) == ["cpu", "cpu"]
    assert placement.own_devices("cuda:2", {}) == ["cuda:2"]


def test_limits_are_set_as_fractions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(placement, "look_at_machine", lambda: FOUR_GPUS)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *args: calls.append(args)
    )
    placement.enforce([Claim("policy", "auto"), Claim("renderer", "cuda:3", 6.0)], "cuda:0")
    assert calls == [(0.25, "cuda:3")]
    with pytest.raises(ValueError, match="'cuda:4' given"):
        placement.enforce([Claim("renderer", "cuda:4", 6.0)], "cuda:0")
    assert len(calls) == 1
