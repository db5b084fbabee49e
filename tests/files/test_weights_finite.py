"""Weights with NaN or infinity are named before anything is computed with them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tiny_config
import torch
from safetensors.torch import load_file, save_file
from tiny_messages import holds

from rl import build
from rl.model_files import NotFiniteError, align_weights, require_finite
from rl.ranks.dist import Dist
from rl.ranks.signals import sentence


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_single_nan_or_infinity_is_found(value: float, dtype: torch.dtype) -> None:
    module = torch.nn.Linear(8, 8).to(dtype)
    align_weights(module, "cpu")
    with torch.no_grad():
        module.weight[3, 5] = value
    text = "Linear holds NaN or infinity: 1 of the 64 numbers of weight; copy or download it again"
    with pytest.raises(NotFiniteError, match=text):
        align_weights(module, "cpu")


def test_integers_float8_and_empty_tensors_are_accepted() -> None:
    kinds = [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn]
    require_finite([(str(kind), torch.zeros(3).to(kind)) for kind in kinds], "a model")
    require_finite([("empty", torch.zeros(0)), ("meta", torch.zeros(3, device="meta"))], "a model")


def test_a_model_with_nan_is_named_by_its_key(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_config.WEIGHTS / "policy", tmp_path / "policy")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    weights[name][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = tiny_config.shipped("quickstart", f"policy.model_path={folder}")
    with pytest.raises(ValueError) as refused:
        build.build_policy(build.resolve(config), Dist.from_env())
    assert holds(sentence(refused.value), "  policy:  ... holds NaN or infinity: 1 of ")
