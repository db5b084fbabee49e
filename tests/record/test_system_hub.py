"""Pushes of the model to the hub: made when due, in the background, without stopping a run."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_checkpoints
from tiny_checkpoints import names_in
from tiny_messages import holds

from rl.record.checkpoint import Checkpoints


class _Hub:
    """A stand-in for huggingface.co that holds the files of each branch."""

    def __init__(self) -> None:
        self.commits: list[tuple[str, dict[str, str]]] = []
        self.branches: dict[str, dict[str, str]] = {}
        self.starts, self.go = threading.Semaphore(0), threading.Semaphore(1000)

    def create_repo(self, repo_id: str, private: bool, exist_ok: bool) -> None:
        assert repo_id == "me/run" and private and exist_ok

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> Any:
        self.starts.release()
        assert self.go.acquire(timeout=120)
        files = {path.name: path.read_text() for path in folder_path.iterdir()}
        self.commits.append((commit_message, files))
        return SimpleNamespace(oid=str(len(self.commits) - 1))

    def list_repo_refs(self, repo_id: str) -> Any:
        return SimpleNamespace(branches=[SimpleNamespace(name=name) for name in self.branches])

    def delete_branch(self, repo_id: str, branch: str) -> None:
        del self.branches[branch]

    def create_branch(self, repo_id: str, branch: str, revision: str) -> None:
        assert branch not in self.branches
        self.branches[branch] = self.commits[int(revision)][1]


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> _Hub:
    import huggingface_hub

    remote = _Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: remote)
    return remote


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    pushes = {"push_to_hub_every_n_iterations": 20, "push_to_hub_repo_id": "me/run"}
    return tiny_checkpoints.checkpoints_in(tmp_path, **pushes)


def save(checkpoints: Checkpoints, iteration: int, final: bool = False) -> None:
    def write_model(model: Path) -> None:
        (model / "adapter_model.safetensors").write_text(str(iteration))

    tiny_checkpoints.save(checkpoints, iteration, write_model, final)
    checkpoints.publish(iteration, lambda: "card", final)


def model_of(iteration: int) -> dict[str, str]:
    return {"README.md": "card", "adapter_model.safetensors": str(iteration)}


def test_the_model_is_pushed_when_due_and_at_the_end_to_main_and_to_a_branch(
    checkpoints, tmp_path, remote
):
    lines: list[str] = []
    for iteration in (10, 20, 30):
        save(checkpoints, iteration)
    checkpoints.pusher.close(lines.append)
    save(checkpoints, 35, final=True)
    checkpoints.pusher.close(lines.append)
    assert remote.commits == [("iteration 20", model_of(20)), ("iteration 35", model_of(35))]
    assert remote.branches == {"ckpt_000020": model_of(20), "ckpt_000035": model_of(35)}
    assert names_in(tmp_path) == ["step_000030", "step_000035"], "no temporary folder is left"


def test_a_repeated_iteration_moves_its_branch(checkpoints, remote):
    remote.branches["ckpt_000020"] = {"adapter_model.safetensors": "before"}
    save(checkpoints, 20)
    checkpoints.pusher.close(print)
    assert remote.branches == {"ckpt_000020": model_of(20)}


def test_training_and_pruning_continue_during_a_push(checkpoints, tmp_path, remote, capfd):
    remote.go = threading.Semaphore(0)
    save(checkpoints, 20)
    assert remote.starts.acquire(timeout=120), "the upload is under way"
    for iteration in (20, 40, 60):
        save(checkpoints, iteration)
    save(checkpoints, 65, final=True)
    assert (tmp_path / "checkpoints" / "step_000020").exists(), "it is being read"
    lines: list[str] = []
    checkpoints.pusher.close(lines.append, timeout_s=0.01)
    warnings = capfd.readouterr().err
    assert holds(warnings, "iteration 40: not uploaded ... iteration 60: not uploaded")
    assert "iteration 65" not in warnings and "not done after 0.0 s" in warnings
    remote.go.release(2)
    checkpoints.pusher.close(lines.append)
    assert remote.branches == {"ckpt_000020": model_of(20), "ckpt_000065": model_of(65)}
    assert len(lines) == 2 and holds(lines[1], "me/run ... 10 min 00 s")
    save(checkpoints, 66)
    assert names_in(tmp_path) == ["step_000065", "step_000066"]


def test_a_failed_push_logs_one_warning(checkpoints, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    # Uses the real client; the tests run with HF_HUB_OFFLINE=1.
    save(checkpoints, 20, final=True)
    checkpoints.pusher.close(print)
    warning = capfd.readouterr().err
    assert warning.count("WARNING") == 1
    assert holds(warning, "'me/run', iteration 20 ... Offline")
    assert "hf_0123456789abcdef" not in warning
    assert names_in(tmp_path) == ["step_000020"]
