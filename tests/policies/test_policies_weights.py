"""What the policies of every family train, save, export and read again, against transformers and
PEFT, in float32 on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from padded_reference import stock
from safetensors.torch import load_file
from tiny_policy import ADAPTER, FAMILIES, make, move, saved, trainable
from tiny_rounding import FORWARD_TOL, apart
from tiny_rows import logprobs, rows_of

TOWER = {"freeze_vision_tower": False}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_adapter_loads_in_peft_and_as_adapter_path_and_is_exported(
    family: str, tmp_path: Path
) -> None:
    from peft import PeftModel

    policy = make(family, lora=ADAPTER)
    move(policy)
    policy.save_pretrained(str(tmp_path), trainable(policy))
    base = stock(saved(family))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["auto_mapping"]["base_model_class"] == type(base).__name__
    restored = PeftModel.from_pretrained(base, tmp_path)
    assert restored.peft_config["default"].base_model_name_or_path == saved(family)
    theirs = {name: p for name, p in restored.named_parameters() if "lora_" in name}
    ours = {name.removeprefix("model."): p for name, p in trainable(policy).items()}
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)

    exported = policy.export_weights(trainable(policy), version=3)
    assert exported.kind == "lora" and exported.version == 3
    files = load_file(tmp_path / "adapter_model.safetensors")
    assert exported.tensors.keys() == files.keys()
    assert all(torch.equal(exported.tensors[name], files[name]) for name in files)
    for tensor in exported.tensors.values():
        tensor.mul_(2)
    assert all(torch.equal(theirs[name], ours[name]) for name in ours), "the export is a copy"

    again, rows = make(family, lora=ADAPTER, adapter_path=str(tmp_path)), rows_of(policy)
    assert apart(logprobs(again, rows), logprobs(policy, rows)) <= FORWARD_TOL
    assert trainable(again).keys() == trainable(policy).keys()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_full_model_loads_in_transformers_and_is_exported(
    family: str, tied: bool, tmp_path: Path
) -> None:
    policy = make(saved(family, tied=tied), lora=None)
    assert any("lm_head" in name for name in trainable(policy)) != tied
    move(policy, 0.02)
    policy.save_pretrained(str(tmp_path), trainable(policy))
    restored, live = stock(tmp_path), policy.module.base_model.state_dict()
    assert type(restored).__name__ in policy.model_classes
    for name, tensor in restored.state_dict().items():
        assert torch.equal(tensor, live[name]), name

    exported = policy.export_weights(trainable(policy), 3)
    assert exported.kind == "full" and exported.version == 3
    # The tower is frozen; the head is always there, because the engine has one of its own.
    assert exported.tensors.keys() == {name for name in live if "visual" not in name}
    for name, tensor in exported.tensors.items():
        assert torch.equal(tensor, live[name]) and not tensor.requires_grad
        # The export must not copy the model, which may fill half a GPU.
        assert tensor.data_ptr() == live[name].data_ptr()
    again, rows = make(str(tmp_path), lora=None), rows_of(policy)
    assert apart(logprobs(again, rows), logprobs(policy, rows)) <= FORWARD_TOL


@pytest.mark.parametrize(
    ("family", "section"),
    [
        ("qwen2_5_vl", {"lora": ADAPTER}),
        ("qwen2_5_vl", {"lora": None}),
        ("qwen2_5_vl", TOWER | {"lora": ADAPTER | {"target_modules": ["qkv"]}}),
        ("qwen2_5_vl", TOWER | {"lora": None}),
        ("emu3", {"lora": None}),
    ],
)
def test_the_reference_is_the_policy_before_training(family: str, section: dict[str, Any]) -> None:
    """Also where pictures have kept features, and an adapter's parameters look frozen."""
    policy = make(family, **section)
    rows = rows_of(policy)
    batch, names = policy.collate(rows), trainable(policy).keys()
    with torch.no_grad(), policy.reference():
        base = policy.module(batch).logprobs
    assert apart(base, logprobs(make(family, **section), rows)) <= FORWARD_TOL
    move(policy, 0.05)
    trained = policy.module(batch).logprobs
    assert (trained - base).abs().max() > 1e-2
    trained.sum().backward()
    assert any(p.grad.any() for n, p in trainable(policy).items() if "visual" in n) == (
        "freeze_vision_tower" in section
    )
    with torch.no_grad(), policy.reference():
        assert apart(policy.module(batch).logprobs, base) <= FORWARD_TOL
    assert apart(policy.module(batch).logprobs, trained) <= FORWARD_TOL
    assert trainable(policy).keys() == names
