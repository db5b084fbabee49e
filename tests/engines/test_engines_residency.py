"""At its start a run decides and prints whether the engine stays on its GPU between rollouts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny_config

from rl import build
from rl.progress import Console
from rl.ranks.dist import Dist, Machine
from rl.run import set_up


def plan(monkeypatch, gpu_gb, *overrides: str, device="cuda:1", others=(), folder=""):
    """(has room, claim) on the second GPU of a machine, of `gpu_gb`; the first is too small for
    anything. `others`: memory of the other ranks' GPUs, GB."""
    monkeypatch.setattr(set_up, "look_at_machine", lambda: Machine((8.0, gpu_gb)))
    monkeypatch.setattr(Dist, "gather", lambda self, value: [value, *others])
    resolved = build.resolve(tiny_config.evaluated("qwen_image_edit", *overrides))
    policy = SimpleNamespace(engine_folder=lambda: folder)
    return set_up._engine_memory(resolved, policy, Dist(device=device), Console(True))


@pytest.mark.parametrize(("gpu_gb", "stays"), [(80.0, False), (400.0, True)])
def test_the_memory_plan_decides_and_prints_why(monkeypatch, capsys, gpu_gb, stays):
    has_room, claim = plan(monkeypatch, gpu_gb)
    assert has_room == stays
    printed = capsys.readouterr().out
    assert ("can stay" if stays else "has to sleep") in printed and f"of {gpu_gb:g}" in printed
    # 16 completions of 2304 tokens of 57 344 B, and one block.
    assert claim.cache_bytes == (16 * 2304 + 16) * 57_344
    assert claim.share == pytest.approx(21.63 / gpu_gb, abs=1e-3)
    assert "the engine takes 21.6 GB" in printed and "16.01x" in printed


def test_ranks_follow_the_smallest_gpu(monkeypatch):
    assert plan(monkeypatch, 400.0, others=(80.0,)) == plan(monkeypatch, 80.0)
    tight = "prompts_per_iteration=256"
    assert plan(monkeypatch, 400.0, tight, others=(80.0,)) == plan(monkeypatch, 80.0, tight)
    assert plan(monkeypatch, 400.0, tight) != plan(monkeypatch, 80.0, tight)


def test_for_a_policy_of_unknown_size_no_room_is_assumed(monkeypatch, capsys):
    unknown = ("policy.model_path=nobody/knows", "policy.init_text_encoder_from=''")
    assert plan(monkeypatch, 400.0, *unknown) == (False, None)
    assert "nobody/knows" in capsys.readouterr().out
    # The folder of the loaded policy gives the size.
    has_room, claim = plan(monkeypatch, 400.0, *unknown, folder=str(tiny_config.WEIGHTS / "policy"))
    assert has_room and claim is not None


@pytest.mark.parametrize("choice", ["resident", "sleep"])
def test_a_configured_residency_needs_no_memory_plan(monkeypatch, capsys, choice):
    stated = (f"engine.residency={choice}", "engine.gpu_memory_utilization=0.3")
    assert plan(monkeypatch, 8.0, *stated) == (True, None)
    assert plan(monkeypatch, 8.0, device="cpu") == (True, None)
    assert capsys.readouterr().out == ""
