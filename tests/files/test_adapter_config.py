"""Adapters that other tools write: plain LoRA is read, the rest is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rl.model_files import ADAPTER_CONFIG, read_config


def saved(folder: Path, **changes: Any) -> Path:
    """What PEFT writes for such an adapter."""
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["0"], **changes)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    get_peft_model(model, config).save_pretrained(folder)
    return folder


def scaling(folder: Path) -> float:
    """By which PEFT multiplies the adapter's output."""
    config = LoraConfig.from_pretrained(str(folder))
    layer: Any = get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), config)
    return layer.base_model.model[0].scaling["default"]


def test_a_plain_adapter_is_read(tmp_path: Path) -> None:
    assert read_config(saved(tmp_path, lora_dropout=0.1))["lora_alpha"] == 16


@pytest.mark.parametrize(
    "changes",
    [
        {"alpha_pattern": {"0": 8}},
        {"rank_pattern": {"0": 2}},
        {"bias": "all"},
        {"modules_to_save": ["1"]},
        {"use_dora": True},
    ],
)
def test_other_adapters_are_refused_by_the_key(tmp_path: Path, changes: dict[str, Any]) -> None:
    [key] = changes
    with pytest.raises(ValueError, match=rf"no plain LoRA \({key}: .*merge_and_unload"):
        read_config(saved(tmp_path, **changes))


def test_the_fix_for_rslora_keeps_the_scale(tmp_path: Path) -> None:
    folder = saved(tmp_path, use_rslora=True)
    before = scaling(folder)
    assert before == pytest.approx(16 / 8**0.5)
    with pytest.raises(ValueError, match="set use_rslora to false") as refused:
        read_config(folder)
    alpha = re.search(r"lora_alpha to ([\d.]+)", str(refused.value))
    assert alpha is not None
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    config |= {"use_rslora": False, "lora_alpha": float(alpha[1])}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    assert scaling(folder) == pytest.approx(before, rel=1e-4)
    read_config(folder)
