"""A run folder that cannot be written to is a sentence before any process starts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_messages import names

from rl.check.run_folder import folder_problems, make_problems
from rl.files.atomic import append_line, write_atomically
from rl.files.private import itself, private
from rl.judge.journal import ReplyJournal

NOBODY = 65534


@contextmanager
def anybody() -> Iterator[None]:
    """Without the rights of root, to whom nothing is shut."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A run that was stopped, its owner anybody."""
    with anybody(), tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        (run_dir / "logs").mkdir(parents=True)
        (run_dir / "checkpoints").mkdir()
        for name in ("metrics.jsonl", "logs/rank_0.log"):
            (run_dir / name).write_text("")
        yield run_dir
        for place in (run_dir, *run_dir.rglob("*")):
            place.chmod(0o700)


def test_what_can_be_written_to_is_fine(run_dir: Path) -> None:
    assert folder_problems(run_dir) == folder_problems(run_dir / "not" / "yet") == []
    assert make_problems(run_dir) == make_problems(run_dir.parent / "new" / "one") == []


@pytest.mark.parametrize("name", [".", "logs", "checkpoints", "metrics.jsonl", "logs/rank_0.log"])
def test_what_is_read_only_is_named(run_dir: Path, name: str) -> None:
    (run_dir / name).chmod(0o500)
    assert_refused(run_dir / name, "writable")


def test_a_file_or_the_kernel_in_its_place(tmp_path: Path) -> None:
    for place in (Path("/proc/self/run"), Path("/sys/run"), tmp_path / ("../" * 9) / "proc/run"):
        assert names(folder_problems(place)[0], "base_exp_dir: ... kernel")
    (tmp_path / "file").write_text("")
    [problem] = folder_problems(tmp_path / "file" / "run")
    assert names(problem, f"base_exp_dir: {tmp_path / 'file'} ... file ... folder")


@pytest.mark.parametrize("name", ["metrics.jsonl", ".saving.lock", "judge/left_out.json"])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_in_the_place_of_a_file_is_written_through_by_nobody(
    tmp_path: Path, name: str, there: bool
) -> None:
    """Who goes on with a stranger's run must not write to their own files by it."""
    mine, place = tmp_path / "mine", tmp_path / "run" / name
    place.parent.mkdir(parents=True)
    if there:
        mine.write_text("kept")
    place.symlink_to(mine)
    assert_refused(place, "link ... remove")
    for opener in (itself, private):
        with pytest.raises(OSError, match="link"):
            opener(str(place), os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="link"):
        append_line(place, "a line\n")
    write_atomically(place, "a file of the run's own")
    assert not place.is_symlink() and mine.exists() == there
    assert not there or mine.read_text() == "kept"


def assert_refused(place: Path, parts: str) -> None:
    """By both, with its own path."""
    run_dir = next(folder for folder in (place, *place.parents) if folder.name == "run")
    for problems in (folder_problems(run_dir), make_problems(run_dir)):
        [problem] = problems
        assert names(problem, f"base_exp_dir: {place} ... {parts}")


@pytest.mark.parametrize(
    "write",
    [
        lambda path: append_line(path, "a line\n"),
        lambda path: write_atomically(path, "anew"),
        lambda path: open(path, "a", opener=private).close(),
        lambda path: open(path, "wb", opener=itself).close(),
        lambda path: ReplyJournal(path).put("new", "reply"),
    ],
)
def test_a_snapshot_by_hard_links_is_not_written_through(tmp_path: Path, write) -> None:
    """`cp -al run snapshot`, and one of the two goes on."""
    mine, place = tmp_path / "mine", tmp_path / "place"
    mine.write_text('{"key": "a", "reply": "b"}\n{"key": ')
    mine.chmod(0o644)
    before = mine.read_bytes()
    os.link(mine, place)
    write(place)
    assert mine.read_bytes() == before and mine.stat().st_mode & 0o777 == 0o644
    assert place.stat().st_nlink == mine.stat().st_nlink == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "place"]


def test_a_new_run_is_its_users_alone(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    assert make_problems(tmp_path / "new/run") == make_problems(shared) == []
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "new/run", shared)]
    assert modes == [0o700, 0o755]


@pytest.mark.parametrize("name", ["metrics.jsonl", "judge/replies_0.jsonl"])
def test_a_pipe_in_the_place_of_a_file_is_waited_on_by_nobody(tmp_path: Path, name: str) -> None:
    """It has no reader, and who opens it to write would wait for one for ever."""
    place = tmp_path / "run" / name
    place.parent.mkdir(parents=True)
    os.mkfifo(place)
    assert_refused(place, "no ordinary file ... remove")
    for flags in (os.O_WRONLY, os.O_RDWR):
        for opener in (itself, private):
            with pytest.raises(OSError, match="no ordinary file"):
                opener(str(place), flags | os.O_CREAT | os.O_APPEND)


def test_folders_may_lie_on_another_disk(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("images", "logs", "judge"):
        (tmp_path / "disk" / name).mkdir(parents=True)
        (tmp_path / "run" / name).symlink_to(tmp_path / "disk" / name)
    assert folder_problems(tmp_path / "run") == []
