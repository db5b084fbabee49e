"""Code that a stranger's run folder names runs only if the user names it on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_checkpoints import checkpoints_in, save
from tiny_messages import holds
from tiny_run import run_config

from rl.model_files import read_config
from rl.tools.trained import config_for_use, load_trained


def test_a_plugin_of_its_own_is_not_imported_unasked(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evilplugin.py").write_text("open('ran', 'w')\n")
    save(checkpoints_in(tmp_path), 1)
    model = tmp_path / "checkpoints/step_000001/model"
    (model / "adapter_config.json").write_text('{"r": 1, "lora_alpha": 1}')
    evil = {"type": "evilplugin.Draws"}
    sections = {
        "policy": evil,
        "engine": evil,
        "rewards": {"a": evil},
        "algorithm": {"loss": "evilplugin.loss"},
        "renderer": evil,
    }
    options = {"policy": "--policy evilplugin.Draws", "renderer": "--set renderer.type"}
    for key, value in sections.items():
        values = run_config().model_dump(mode="json") | {key: value}
        (tmp_path / "config.json").write_text(json.dumps(values))
        for run in (tmp_path, model):
            refusal = _refusal(run)
            if key in options:
                assert holds(refusal, f"{key}.type ... evilplugin.Draws ... {options[key]}")
        assert not (tmp_path / "ran").exists(), key
    # Named by the user, the file is imported from the working folder, as in training.
    assert "evilplugin" in _refusal(tmp_path, ["renderer.type=evilplugin.Draws"])
    assert (tmp_path / "ran").exists()


def _refusal(run: Path, settings: Sequence[str] = ()) -> str:
    try:
        config_for_use(load_trained(run), settings)
    except ValueError as error:
        return str(error)
    return ""


def test_an_adapter_that_names_a_module_is_refused(tmp_path: Path) -> None:
    """PEFT imports `megatron_core` where `megatron_config` is set."""
    config = {"r": 1, "megatron_config": {"a": 1}, "megatron_core": "evilplugin"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"adapter_config\.json names megatron_config"):
        read_config(tmp_path)
