"""A run starts one process that shows it, which can neither delay nor end the run."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_messages import holds
from tiny_report import write_run
from tiny_waits import wait_for
from tiny_wandb import KEY

from rl import printing
from rl.config.schema import TrackingConfig
from rl.files import write_atomically
from rl.printing import environment_without, hide, scrub
from rl.run import follower
from rl.run.follower import LOCK, LOG, WANDB_KEY, Follower, wait_for_last_rows


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces Python by a script that notes its arguments, environment and stdin here."""
    script = tmp_path / "python"
    script.write_text(
        f"#!/bin/bash\ncd {tmp_path}\necho \"$*\" >>calls\nenv >environment\n"
        "echo 'WARNING: no key'; echo 'noise of a library'; echo 'follow: wandb: http://url'\n"
        "[[ -e code ]] && exit $(cat code)\ncat >stdin.part; mv stdin.part stdin\n"
    )  # fmt: skip
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return tmp_path


STARTED: list[Follower] = []


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    while STARTED:
        if process := STARTED.pop()._process:
            process.kill()
            process.wait()


def of(folder: Path, is_main: bool = True, **tracking: Any) -> Follower:
    config = TrackingConfig.model_validate({"page": True, **tracking})
    STARTED.append(Follower(folder / "run", config, is_main))
    STARTED[-1].start()
    return STARTED[-1]


def calls(folder: Path) -> list[str]:
    return [line for path in folder.glob("calls") for line in path.read_text().split("\n")[:-1]]


@pytest.mark.parametrize(("failed", "word"), [(False, "ended"), (True, "failed")])
def test_the_follower_is_told_how_the_run_has_ended(fake: Path, failed: bool, word: str) -> None:
    started = of(fake)
    wait_for(lambda: calls(fake))
    started.close(failed)
    wait_for((fake / "stdin").exists)
    assert (fake / "stdin").read_text() == word
    assert calls(fake) == [f"-m rl.tools.commands.follow {fake}/run --with-run"]


def test_a_run_that_is_killed_leaves_a_follower_that_ends(fake: Path, tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from rl.run.follower import Follower; "
        "from rl.config.schema import TrackingConfig; real = sys.executable; "
        f"sys.executable = {sys.executable!r}; "
        f"Follower(Path({str(tmp_path / 'run')!r}), TrackingConfig()).start(); time.sleep(999)"
    )
    run = subprocess.Popen([Path(sys.prefix) / "bin" / "python", "-c", program])
    wait_for(lambda: calls(fake))
    run.send_signal(signal.SIGKILL)
    run.wait()
    wait_for((fake / "stdin").exists)
    assert (fake / "stdin").read_text() == ""


def test_only_the_first_rank_of_a_run_that_is_shown_starts_one(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others print nothing, either."""
    write_atomically(fake / "run" / LOG, "WARNING: no key\n")
    for started in (of(fake, is_main=False), of(fake, page=False)):
        started.look()
        started.close(failed=False)
    assert calls(fake) == []
    assert capsys.readouterr().err == ""


def test_what_the_follower_says_is_printed_once(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = of(fake)
    wait_for(lambda: "http" in (fake / "run" / LOG).read_text())
    started.look()
    started.look()
    assert capsys.readouterr().err == "WARNING: no key\nwandb: http://url\n"
    assert (fake / "run" / LOG).stat().st_mode & 0o777 == 0o600
    started.close(failed=False)
    assert capsys.readouterr().err == ""


def test_a_line_written_between_the_end_and_the_wait_is_printed(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A judge that the run started ends in between, which takes seconds."""
    of(fake).close(failed=False)
    wait_for((fake / "stdin").exists)
    wait_for_last_rows(fake / "run", lambda: False)
    assert capsys.readouterr().err.count("WARNING: no key\n") == 1
    wait_for_last_rows(fake / "run", lambda: False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (Path.mkdir, "Is a directory"),
        (os.mkfifo, "not an ordinary file"),
        (lambda _: setattr(sys, "executable", "/no/python"), "No such file"),
    ],
)
def test_a_follower_that_cannot_start_is_a_warning(
    tmp_path: Path,
    make: Callable[[Path], None],
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also if its log cannot be read."""
    monkeypatch.setattr(sys, "executable", sys.executable)  # restored after the test
    (tmp_path / "run/logs").mkdir(parents=True)
    make(tmp_path / "run" / LOG)
    started = of(tmp_path)
    started.look()
    started.close(failed=False)
    wait_for_last_rows(tmp_path / "run", lambda: False)
    assert holds(capsys.readouterr().err, f"WARNING ... cannot be started ... {cause}")


def test_a_follower_that_ends_early_is_a_warning_with_the_command(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake / "code").write_text("3")
    started = of(fake)
    started._process.wait()
    started.look()
    started.look()
    errors = capsys.readouterr().err
    assert errors.count("exit code 3") == 1
    assert holds(errors, f"WARNING: the process that sends ... rl follow {fake}/run sends")


def test_keys_reach_the_follower_that_needs_them_and_nothing_else(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(printing, "_hidden", {})
    monkeypatch.setenv(WANDB_KEY, KEY)
    monkeypatch.setenv("HF_TOKEN", f"hf_{KEY}")
    monkeypatch.setenv("WANDB_BASE_URL", "https://me:hunter2hunter2@wandb.example")
    monkeypatch.setenv("JUDGE_KEY", KEY[::-1])
    hide(WANDB_KEY)
    assert WANDB_KEY not in os.environ and WANDB_KEY not in environment_without()
    assert scrub(f"a {KEY}") == f"a <{WANDB_KEY}>"
    for tracking, has_key, has_token in (
        ({"wandb": "online"}, True, False),
        ({"wandb": "offline", "trackio": True, "trackio_space": "me/mine"}, False, True),
        ({}, False, False),
    ):
        (fake / "environment").unlink(missing_ok=True)
        started = of(fake, **tracking)
        started.close(failed=False)
        started._process.wait()
        names = (fake / "environment").read_text()
        assert (f"{WANDB_KEY}={KEY}" in names) == ("WANDB_BASE_URL=" in names) == has_key
        assert ("HF_TOKEN=" in names) == has_token and "JUDGE_KEY" not in names


def test_the_end_waits_for_the_last_rows_but_not_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_for_last_rows(tmp_path, lambda: False)  # nothing follows it
    lock = tmp_path / LOCK.format("wandb")
    lock.parent.mkdir()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        monkeypatch.setattr(follower, "LIMIT_S", -follower._END_S)
        wait_for_last_rows(tmp_path, lambda: False)
        wait_for_last_rows(tmp_path, lambda: True)
        assert capsys.readouterr().err.count(f"rl follow {tmp_path} sends them") == 2
        monkeypatch.setattr(follower, "LIMIT_S", 60.0)

        def end() -> None:
            (tmp_path / LOG).write_text("WARNING: not everything\n")
            fcntl.flock(file, fcntl.LOCK_UN)

        threading.Timer(0.3, end).start()
        wait_for_last_rows(tmp_path, lambda: False)
    assert capsys.readouterr().err == "WARNING: not everything\n"


def test_a_real_follower_writes_the_page_and_ends_after_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run", num_iterations=1)
    started = of(tmp_path)
    wait_for((run_dir / LOCK.format("page")).exists)
    for signum in (signal.SIGINT, signal.SIGTERM):  # a batch system sends them to every process
        wait_for((run_dir / "report/index.html").exists)
        os.kill(started._process.pid, signum)
    (run_dir / "report/index.html").unlink()
    started.close(failed=False)
    wait_for_last_rows(run_dir, lambda: False)
    assert (run_dir / "report/index.html").is_file()
    assert started._process.wait() == 0
    assert capsys.readouterr().err == ""
