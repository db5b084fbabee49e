"""A run records what it ran on, and a resume under something else names it."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from tiny_edits import edits
from tiny_loop import rows_of
from tiny_messages import holds

from rl.check import this_machine
from rl.ranks.dist import Dist
from rl.run import set_up
from rl.run.set_up import FILE, record_environment

TEXT_ONLY = {"source": ""}


class Second(Dist):
    """The main rank of two, of which the other has a GPU."""

    def gather(self, value: str) -> list[str]:
        return [value, "GPU X"]


def test_a_resume_under_other_versions_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Any] = [{"instruction": "red", "id": "a"}, {"instruction": "blue", "id": "b"}]
    sources = [edits(tmp_path, rows, columns=TEXT_ONLY)]
    for done in (0, 3):
        record_environment(tmp_path, done, Dist(), sources)
    [first, second] = rows_of(tmp_path / FILE)
    assert first["iterations_done"] == 0 and second == {**first, "iterations_done": 3}
    assert first["torch"] == version("torch") and first["devices"] and "driver" not in first
    assert not capsys.readouterr().err

    (tmp_path / "nvidia").write_text("NVRM version: NVIDIA UNIX x86_64  575.57.08  Release\n")
    monkeypatch.setattr(set_up, "_DRIVER", tmp_path / "nvidia")
    monkeypatch.setattr(this_machine, "PACKAGES", {"torch"})
    monkeypatch.setattr(set_up, "_code", lambda: "another commit")
    record_environment(tmp_path, 4, Second(), sources)
    parts = (
        f"code {first['code']} -> another commit, ... peft {version('peft')} -> absent, ... "
        f"devices {first['devices']} -> ... GPU X ... driver absent -> 575.57.08"
    )
    assert holds(capsys.readouterr().err, parts)
    record_environment(tmp_path, 5, Second(), sources)
    assert not capsys.readouterr().err, "named once"
    record_environment(tmp_path, 6, Second(), [edits(tmp_path, rows[::-1], columns=TEXT_ONLY)])
    assert holds(capsys.readouterr().err, f"another data {first['data']} ->")


def test_the_code_is_a_commit_or_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "ROOT", tmp_path)
    assert set_up._code() == version("vlm-edit-rl")
    (tmp_path / ".git").mkdir()
    assert set_up._code() == version("vlm-edit-rl"), "a repository that git does not read"
    (tmp_path / ".git").rmdir()

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path), *words]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    commit = git("rev-parse", "HEAD")
    assert set_up._code() == commit
    (tmp_path / "file").write_text("2")
    assert set_up._code() == f"{commit}-dirty"
