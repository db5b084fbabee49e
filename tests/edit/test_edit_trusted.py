"""A run folder may be a stranger's: code that its config names runs only if the user names it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_checkpoints import checkpoints_in, save
from tiny_messages import names
from tiny_run import run_config

from rl.edit.trained import config_for_use, load_trained
from rl.files.adapter_base import read_config


def test_a_plugin_of_its_own_is_not_imported_unasked(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evilplugin.py").write_text("open('ran', 'w')\n")
    save(checkpoints_in(tmp_path), 1)
    model = tmp_path / "checkpoints/step_000001/model"
    (model / "adapter_config.json").write_text('{"r": 1, "lora_alpha": 1}')
    evil = {"type": "evilplugin.Draws"}
    for room in ("renderer", "policy", "engine", "rewards", "algorithm"):
        other = {"rewards": {"a": evil}, "algorithm": {"loss": "evilplugin.loss"}}.get(room, evil)
        values = run_config().model_dump(mode="json") | {room: other}
        (tmp_path / "config.json").write_text(json.dumps(values))
        found = [_refusal(run) for run in (tmp_path, model)]
        if room in ("renderer", "policy"):
            wanted = f"{room}.type ... evilplugin.Draws ... --set {room}.type"
            assert all(names(message, wanted) for message in found), found
        assert not (tmp_path / "ran").exists(), room
    values = run_config().model_dump(mode="json") | {"renderer": evil}
    (tmp_path / "config.json").write_text(json.dumps(values))
    # It is no plugin, and found in the working folder, as in training.
    named = _refusal(tmp_path, ["renderer.type=evilplugin.Draws"])
    assert "evilplugin" in named
    assert (tmp_path / "ran").exists()


def _refusal(run: Path, settings: Sequence[str] = ()) -> str:
    try:
        config_for_use(load_trained(run), settings)
    except ValueError as error:
        return str(error)
    return ""


def test_an_adapter_names_no_module_to_be_imported(tmp_path: Path) -> None:
    """PEFT imports `megatron_core` where `megatron_config` is set."""
    written = {"r": 1, "megatron_config": {"a": 1}, "megatron_core": "evilplugin"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"adapter_config\.json names megatron_config"):
        read_config(tmp_path)
