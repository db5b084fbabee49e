"""A run folder that cannot be written to is reported before any process starts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_messages import holds

from rl.check.check_report import create_and_check, folder_problems
from rl.files import append_line, no_links, private, write_atomically
from rl.judge.http import ReplyJournal

NOBODY = 65534


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """The folder of a stopped run, owned by an ordinary user."""
    user = os.geteuid()
    os.seteuid(user or NOBODY)  # root may write anywhere
    try:
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder) / "run"
            for name in ("logs", "checkpoints"):
                (run_dir / name).mkdir(parents=True)
            for name in ("metrics.jsonl", "logs/rank_0.log"):
                (run_dir / name).touch()
            yield run_dir
            for path in (run_dir, *run_dir.rglob("*")):
                path.chmod(0o700)
    finally:
        os.seteuid(user)


def test_a_writable_run_folder_is_accepted(run_dir: Path) -> None:
    assert folder_problems(run_dir) == folder_problems(run_dir / "not" / "yet") == []
    assert create_and_check(run_dir) == create_and_check(run_dir.parent / "new" / "one") == []


@pytest.mark.parametrize("name", [".", "logs", "checkpoints", "metrics.jsonl", "logs/rank_0.log"])
def test_what_is_read_only_is_named(run_dir: Path, name: str) -> None:
    (run_dir / name).chmod(0o500)
    assert_refused(run_dir / name, "writable")


def test_a_run_folder_in_a_file_or_in_proc_is_refused(tmp_path: Path) -> None:
    assert holds(
        create_and_check(Path("/proc/self/run"))[0], "base_exp_dir: /proc/self/run cannot be"
    )
    (tmp_path / "file").write_text("")
    assert holds(folder_problems(Path("~/runs/a"))[0], "base_exp_dir: ~/runs/a ... write it out")
    [problem] = folder_problems(tmp_path / "file" / "run")
    assert holds(problem, f"base_exp_dir: {tmp_path / 'file'} ... file ... folder")


@pytest.mark.parametrize("name", ["metrics.jsonl", ".saving.lock", "judge/replies.jsonl"])
@pytest.mark.parametrize("exists", [True, False])
def test_nothing_is_written_through_a_link_in_the_place_of_a_file(
    tmp_path: Path, name: str, exists: bool
) -> None:
    """Resuming a stranger's run must not write to the user's own files."""
    target, link = tmp_path / "mine", tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    if exists:
        target.write_text("kept")
    link.symlink_to(target)
    assert_refused(link, "link ... remove")
    for opener in (no_links, private):
        with pytest.raises(OSError, match="link"):
            opener(str(link), os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="link"):
        append_line(link, "a line\n")
    write_atomically(link, "a file of the run's own")
    assert not link.is_symlink() and target.exists() == exists
    assert not exists or target.read_text() == "kept"


def assert_refused(path: Path, parts: str) -> None:
    """Both checks refuse the path and name it."""
    run_dir = next(folder for folder in (path, *path.parents) if folder.name == "run")
    for problems in (folder_problems(run_dir), create_and_check(run_dir)):
        [problem] = problems
        assert holds(problem, f"base_exp_dir: {path} ... {parts}")


@pytest.mark.parametrize(
    "write",
    [
        lambda path: append_line(path, "a line\n"),
        lambda path: write_atomically(path, "anew"),
        lambda path: open(path, "a", opener=private).close(),
        lambda path: open(path, "wb", opener=no_links).close(),
        lambda path: ReplyJournal(path).put("new", "reply"),
    ],
)
def test_a_snapshot_by_hard_links_is_not_written_through(tmp_path: Path, write) -> None:
    """After `cp -al run snapshot`, one of the two is resumed."""
    snapshot, path = tmp_path / "mine", tmp_path / "place"
    snapshot.write_text('{"key": "a", "reply": "b"}\n{"key": ')
    snapshot.chmod(0o644)
    before = snapshot.read_bytes()
    os.link(snapshot, path)
    write(path)
    assert snapshot.read_bytes() == before and snapshot.stat().st_mode & 0o777 == 0o644
    assert path.stat().st_nlink == snapshot.stat().st_nlink == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "place"]


def test_a_new_run_folder_is_private(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    assert create_and_check(tmp_path / "new/run") == create_and_check(shared) == []
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "new/run", shared)] == [
        0o700,
        0o755,
    ]


@pytest.mark.parametrize("name", ["metrics.jsonl", "judge/replies_0.jsonl"])
def test_a_pipe_in_the_place_of_a_file_never_blocks(tmp_path: Path, name: str) -> None:
    """The pipe has no reader: opening it for writing would block forever."""
    pipe = tmp_path / "run" / name
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    assert_refused(pipe, "not an ordinary file ... remove")
    for flags in (os.O_WRONLY, os.O_RDWR):
        for opener in (no_links, private):
            with pytest.raises(OSError, match="not an ordinary file"):
                opener(str(pipe), flags | os.O_CREAT | os.O_APPEND)


@pytest.mark.parametrize("name", ["episodes", "config.json/x", "metrics.jsonl/x"])
def test_a_file_in_the_place_of_a_folder_is_refused_and_the_reverse(tmp_path: Path, name) -> None:
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.touch()
    assert_refused(tmp_path / "run" / name.removesuffix("/x"), "and a run has a ... move")


def test_subfolders_may_link_to_another_disk(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("images", "logs", "judge"):
        (tmp_path / "disk" / name).mkdir(parents=True)
        (tmp_path / "run" / name).symlink_to(tmp_path / "disk" / name)
    assert folder_problems(tmp_path / "run") == []
