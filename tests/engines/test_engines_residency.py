"""Whether the sampler stays on its GPU while others work: decided at the start, and said."""

from __future__ import annotations

import pytest

from rl import build
from rl.config.schema import load_config
from rl.ranks.placement import Machine
from rl.record.console import Console
from rl.run import set_up


def has_room(monkeypatch, gpu_gb: float, *overrides: str, device: str = "cuda:1") -> bool:
    """On the second GPU of a machine whose first is too small for anything."""
    monkeypatch.setattr(set_up.placement, "look_at_machine", lambda: Machine((8.0, gpu_gb)))
    needed = ("BASE_EXP_DIR", "REWARD_FUNCTION_API_BASE", "RUN_NAME")
    env = {f"APP__{name}": "set" for name in needed}
    config = load_config("configs/qwen_image_edit.jsonnet", list(overrides), env)
    resolved = build.resolve(config)
    return set_up._engine_has_room(resolved, device, Console(True))


@pytest.mark.parametrize(("gpu_gb", "stays"), [(80.0, False), (400.0, True)])
def test_the_memory_plan_decides_and_says_why(monkeypatch, capsys, gpu_gb, stays):
    assert has_room(monkeypatch, gpu_gb) == stays
    said = capsys.readouterr().out
    assert ("may stay" if stays else "has to sleep") in said and f"of {gpu_gb:g}" in said


def test_a_policy_of_unknown_size_leaves_no_room(monkeypatch, capsys):
    assert not has_room(
        monkeypatch, 400.0, "policy.model_path=nobody/knows", "policy.init_text_encoder_from=''"
    )
    assert "nobody/knows" in capsys.readouterr().out


@pytest.mark.parametrize("choice", ["resident", "sleep"])
def test_what_the_config_decides_needs_no_plan(monkeypatch, capsys, choice):
    assert has_room(monkeypatch, 8.0, f"engine.residency={choice}")
    assert has_room(monkeypatch, 8.0, device="cpu")
    assert capsys.readouterr().out == ""
