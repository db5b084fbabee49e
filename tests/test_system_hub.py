"""The model card, and a push that is made when due and never stops a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import run_config

from rl.config import CheckpointConfig
from rl.system import hub
from rl.system.checkpoint import Checkpoints
from rl.system.dist import Dist
from rl.system.seeding import rng_state


def card(**changes: Any) -> str:
    config = run_config(**changes).model_dump(mode="json")
    return hub.model_card(config, 50, {"eval/reward": 0.81234, "time/learn_s": 3.0})


def test_the_card_says_what_it_is_and_what_it_scored():
    text = card()
    assert text.startswith("---\nbase_model: some/base\nlibrary_name: peft\ntags:\n- grpo\n")
    assert "after 50 iterations of GRPO" in text and "`judge` (viescore)" in text
    assert "| eval/reward | 0.8123 |" in text and "time/learn_s" not in text


@pytest.mark.parametrize("path", ["/models/qwen", "./here/qwen", "assets/tiny/policy"])
def test_a_local_folder_is_no_base_model_on_the_hub(path):
    assert "base_model" not in card(policy={"type": "qwen2_5_vl", "model_path": path})


class _Hub:
    """Stands for huggingface.co."""

    def __init__(self, uploads: list[tuple[str, list[str], str]]) -> None:
        self.uploads = uploads

    def create_repo(self, repo_id: str, private: bool, exist_ok: bool) -> None:
        assert private and exist_ok

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> None:
        names = sorted(path.name for path in folder_path.iterdir())
        self.uploads.append((repo_id, names, commit_message))


def save_at(folder: Path, iterations: list[int], final: int) -> None:
    config = CheckpointConfig(push_to_hub_every_n_iterations=20, push_to_hub_repo_id="me/run")
    checkpoints = Checkpoints(folder, config, Dist())
    for iteration in iterations:
        checkpoints.save(
            iteration,
            {"w": torch.ones(1)},
            {},
            rng_state(),
            lambda model: (model / "adapter_model.safetensors").write_text("x"),
            "card",
            final=iteration == final,
        )


def test_the_model_folder_is_pushed_when_due_and_at_the_end(tmp_path, monkeypatch):
    import huggingface_hub

    uploads: list[tuple[str, list[str], str]] = []
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: _Hub(uploads))
    save_at(tmp_path, [10, 20, 30, 35], final=35)
    files = ["README.md", "adapter_model.safetensors"]
    assert uploads == [("me/run", files, "iteration 20"), ("me/run", files, "iteration 35")]


def test_a_push_that_fails_is_one_warning(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    # The real client; the suite runs with HF_HUB_OFFLINE=1.
    save_at(tmp_path, [20], final=20)
    warning = capfd.readouterr().err
    assert warning.count("WARNING") == 1 and "push_to_hub to 'me/run' failed" in warning
    assert "hf_0123456789abcdef" not in warning
    assert (tmp_path / "checkpoints" / "step_000020" / "manifest.json").is_file()
