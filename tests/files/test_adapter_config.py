"""Adapters that other tools write: plain LoRA is read, the rest is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rl.model_files import read_config


def saved(folder: Path, **changes: Any) -> Path:
    """What PEFT writes for such an adapter."""
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["0"], **changes)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    get_peft_model(model, config).save_pretrained(folder)
    return folder


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
        {"use_rslora": True},
    ],
)
def test_other_adapters_are_refused_by_the_key(tmp_path: Path, changes: dict[str, Any]) -> None:
    [key] = changes
    with pytest.raises(ValueError, match=rf"no plain LoRA \({key}: .*merge_and_unload"):
        read_config(saved(tmp_path, **changes))
