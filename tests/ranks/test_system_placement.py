"""The config keys that place models on devices, and the problems that they may have."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from tiny_messages import holds

from rl.api.plugin import PlacedConfig
from rl.ranks import dist
from rl.ranks.dist import Claim, Machine, problems, resolve_device

FOUR_GPUS = Machine(cuda_gb=(80.0, 80.0, 80.0, 24.0))


@pytest.mark.parametrize(
    ("key", "rank_device", "device"),
    [
        ("auto", "cuda:3", "cuda:3"),
        ("auto", "cpu", "cpu"),
        ("cpu", "cuda:3", "cpu"),
        ("cuda:1", "cuda:3", "cuda:1"),
        ("cuda:+2", "cuda:3", "cuda:5"),
        ("cuda:+0", "cuda:3", "cuda:3"),
    ],
)
def test_device_keys_become_devices(key: str, rank_device: str, device: str) -> None:
    assert resolve_device(key, rank_device) == device


def at(device: str, limit_gb: float | None = None) -> Claim:
    return Claim("renderer", device, limit_gb)


AUTO, CLIP = Claim("policy", "auto"), Claim("rewards.clip", "cuda:2")


@pytest.mark.parametrize(
    ("claims", "rank_devices", "machine", "expected"),
    [
        ([at("cuda:+1")], ["cpu"], None, ["renderer.device: 'cuda:+1' ... runs on cpu"]),
        ([at("cuda:7")], ["cuda:0"], FOUR_GPUS, ["'cuda:7' ... 4 CUDA ... 'auto'"]),
        ([at("cuda:7")], ["cuda:0"], None, []),
        ([at("cuda:0")], ["cpu"], Machine(), ["0 CUDA devices ... 'auto'"]),
        ([at("cuda:+4")], ["cuda:0"], FOUR_GPUS, ["'cuda:+4' ... cuda:4"]),
        (
            [AUTO, at("cuda:1"), CLIP],
            ["cuda:0", "cuda:1"],
            FOUR_GPUS,
            ["renderer.device: 'cuda:1' ... ranks 0, 1 on cuda:1 ... 'cuda:+2'", "clip.device"],
        ),
        # The device of another rank counts as shared.
        ([AUTO, at("cuda:+1")], ["cuda:0", "cuda:1"], FOUR_GPUS, ["ranks 0, 1 on cuda:1"]),
        ([AUTO, at("cuda:+2")], ["cuda:0", "cuda:1"], FOUR_GPUS, []),
        # Limits on one device add up, and need a limit for every model on that device.
        ([AUTO, at("cuda:1", 30.0), Claim("x", "cuda:1", 2.5)], ["cuda:0"], FOUR_GPUS, []),
        ([AUTO, at("auto", 30.0)], ["cuda:0"], FOUR_GPUS, ["max_memory_gb: ... cuda:0 ... policy"]),
        ([AUTO, at("auto", 30.0)], ["cpu"], Machine(), []),
    ],
)
def test_a_wrong_placement_names_its_key(
    claims: list[Claim], rank_devices: list[str], machine: Machine | None, expected: list[str]
) -> None:
    messages = problems(claims, rank_devices, machine)
    assert len(messages) == len(expected) and all(map(holds, messages, expected)), messages


@pytest.mark.parametrize("typo", ["gpu", "cuda", "cuda:", "cuda:-1", "cuda:one", "", "Cpu"])
def test_what_is_no_device_is_refused(typo: str) -> None:
    with pytest.raises(ValidationError, match="device"):
        PlacedConfig(device=typo)


def test_each_claim_is_a_line() -> None:
    assert list(dist.describe([AUTO, Claim("renderer", "cuda:1", 3.0)])) == [
        "policy               the rank's own device",
        "renderer             cuda:1, at most 3 GB",
    ]


def test_the_devices_of_this_machines_ranks_follow_the_launcher_variables() -> None:
    two = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert dist.local_rank_devices("cuda:1", two) == ["cuda:0", "cuda:1"]
    assert dist.local_rank_devices("cpu", two) == ["cpu", "cpu"]
    assert dist.local_rank_devices("cuda:2", {}) == ["cuda:2"]


def test_memory_limits_are_set_as_fractions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(dist, "look_at_machine", lambda: FOUR_GPUS)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *args: calls.append(args)
    )
    dist.enforce([AUTO, at("cuda:3", 6.0)], "cuda:0")
    assert calls == [(0.25, "cuda:3")]
    with pytest.raises(ValueError, match="'cuda:4' is cuda:4"):
        dist.enforce([at("cuda:4", 6.0)], "cuda:0")
    assert len(calls) == 1
