"""Everything that Python prints is free of control sequences and keys."""

from __future__ import annotations

import io
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_config import REPO

from rl import printing, progress
from rl.files import private
from rl.progress import Console, PhaseTimer, counted, shown_on, warn

KEY = "sk-0123456789"
EVIL = f"\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\u200b\rWARNING\x08 {KEY} \ud83d"
FORBIDDEN = ("\x1b", "\x07", "\x9b", "\u202e", "\u200b", "\x08", "\ud83d", KEY)


@pytest.fixture(autouse=True)
def a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", KEY)


def assert_harmless(text: str) -> None:
    assert "\\x1b[2J" in text and "<SOME_API_KEY>" in text, text
    assert not [sign for sign in FORBIDDEN if sign in text], text


def log(text: str) -> None:
    """Logs as Python does without a logging configuration."""
    logging.lastResort.handle(logging.makeLogRecord({"msg": text, "levelno": logging.WARNING}))


def test_everything_that_python_prints_is_guarded(capsys, monkeypatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))  # restored after the test
    printing.guard()
    printing.guard()
    assert not sys.stdout.isatty() and printing.wrapped(sys.stdout) is not sys.stdout
    for say in (print, warn, log, sys.stderr.write, Console(enabled=True).say):
        say(EVIL)
        output = "".join(capsys.readouterr())
        assert_harmless(output)
        assert "\r" not in output
    timer = PhaseTimer(Console(enabled=True))
    with timer.phase("judge") as phase:
        phase.note(EVIL)
    timer.lap()
    assert_harmless(capsys.readouterr().out)
    sys.stderr.writelines(["a\tb\n", "größer, 好\n", "\r 50 %|###"])
    assert capsys.readouterr().err == "a\tb\ngrößer, 好\n\r 50 %|###"


def test_a_live_line_of_rich_keeps_the_guard(
    terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal rich redirects stdout and stderr while its live line is shown."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    printing.guard()
    guarded = sys.stdout, sys.stderr
    console = Console(enabled=True)
    timer = PhaseTimer(console)
    monkeypatch.setattr(progress, "LOOK_EVERY_S", 0.0)
    with shown_on(console), timer.phase("judge") as phase:
        assert sys.stdout is not guarded[0], "rich has redirected it"
        phase.note(EVIL)
        print(EVIL)
        warn(EVIL)
        with counted(EVIL, 2) as counter:
            counter.step()
            warn("below it")
    timer.lap()
    assert (sys.stdout, sys.stderr) == guarded
    text = terminal.getvalue()
    assert "WARNING" in text and "<SOME_API_KEY>" in text and "\x1b[?25l" in text, "a live line"
    for sign in (KEY, "\x1b]", "\x1b[2J", "\u202e", "\x07", "\x9b", "\u200b"):
        assert sign not in text, repr(text)


def test_the_traceback_of_an_unexpected_error_is_guarded_too() -> None:
    code = f"from rl import printing, progress; printing.guard(); raise ValueError({EVIL!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO)
    assert result.returncode == 1
    assert_harmless(result.stderr)


def test_private_files_are_readable_only_by_their_owner(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("old\n")
    old.chmod(0o666)
    before = os.umask(0)
    try:
        for path in (old, new):
            with open(path, "a", opener=private) as file:
                file.write("said\n")
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert old.read_text() == "old\nsaid\n"


def test_a_full_disk_under_the_log_does_not_end_the_run() -> None:
    """Rank 0 prints, and its console writes to the unguarded stream."""
    script = """
import sys
from rl import printing, progress
from rl.progress import Console, warn
printing.guard(keeps_going=True)
Console(True).say("a line")
print("another", flush=True)
warn("a third")
sys.exit(7)
"""
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", script], cwd=REPO, stdout=full, stderr=full, timeout=120
        )
    assert result.returncode == 7


def test_closed_standard_streams_are_not_replaced_by_later_files(tmp_path: Path) -> None:
    """`>&-` or a daemon may close them; C libraries still print to descriptors 1 and 2."""
    script = """
import os, sys
from rl import printing, progress
printing.guard(keeps_going=True)
files = [open(f"{sys.argv[1]}/{number}", "w") for number in range(3)]
print("Python's", file=sys.stderr, flush=True)
os.write(1, b"a C library's")
[file.write("kept") for file in files]
assert sys.stdin.read() == "" and all(map(os.get_inheritable, (0, 1, 2)))
"""
    for closed in ("0<&-", "1>&-", "0<&- 1>&- 2>&-"):
        command = ["bash", "-c", f'exec "$@" {closed}', "", sys.executable, "-c", script, tmp_path]
        result = subprocess.run(command, cwd=REPO, capture_output=True, stdin=subprocess.DEVNULL)
        assert result.returncode == 0, result.stderr
        assert {file.read_text() for file in tmp_path.iterdir()} == {"kept"}
