"""The fingerprint of exported weights, and an adapter summed into its matrices."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_policy
import tiny_qwen
import torch

from rl.policies.shared import adapters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(9, 7), (3, 2050), (5,)], ids=["small", "columns", "vector"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda w: w.view(-1)[-1:].mul_(1.01), id="the last value"),
        pytest.param(lambda w: w.copy_(w.roll(1, dims=0)), id="rows in other places"),
        pytest.param(lambda w: w.copy_(w.flip(-1)), id="columns in other places"),
        pytest.param(lambda w: w[1].neg_(), id="signs alone"),
    ],
)
def test_weights_have_another_fingerprint_exactly_when_they_changed(
    dtype: torch.dtype, shape: tuple[int, ...], change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    weights = {"w": torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)}
    first = adapters.fingerprint(weights)
    # Other memory, and a start that no 64-bit number may have.
    other = torch.cat([weights["w"].view(-1)[:1], weights["w"].view(-1)])[1:].view(shape)
    assert adapters.fingerprint({"w": other}) == first
    change(weights["w"])
    assert adapters.fingerprint(weights) != first


def test_at_most_24_bytes_a_tensor_come_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes: list[int] = []
    to_host = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        num_bytes.append(tensor.numel() * tensor.element_size())
        return to_host(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    large = torch.zeros(2049, 2048, dtype=torch.bfloat16)
    adapters.fingerprint({"a": torch.zeros(8, 128), "b": large})
    assert num_bytes == [8 + 24]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_is_what_peft_merges_and_the_base_is_only_read(tmp_path: Path, dtype: str) -> None:
    """q and v are adapted; k, which samplers fuse with them, and o are in the same block."""
    folder = tiny_qwen.save_policy_folder(tmp_path)
    lora = {"r": 4, "alpha": 6, "target_modules": ["q_proj", "v_proj"]}
    policy = tiny_policy.make_policy(folder, dtype=dtype, lora=lora)
    before = {name: p.detach().clone() for name, p in policy.module.named_parameters()}
    for _ in range(20):
        merged = dict(policy.merged_weights())
    assert all(torch.equal(p, before[n]) for n, p in policy.module.named_parameters())
    stock = policy.module.model.merge_and_unload().state_dict()
    assert {name.split(".")[-2] for name in merged} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    for name, tensor in merged.items():
        assert torch.equal(tensor, stock[name]), name
    moved = [name for name, tensor in merged.items() if (tensor != base(before, name)).any()]
    assert moved == [name for name in merged if name.endswith(("q_proj.weight", "v_proj.weight"))]


def base(before: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The parameter that transformers calls `name`, with and without a layer of PEFT's around."""
    block, kind = name.rsplit(".", 1)
    wrapped = f"model.base_model.model.{block}.base_layer.{kind}"
    return before.get(wrapped, before.get(f"model.base_model.model.{name}"))
