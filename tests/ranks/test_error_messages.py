"""An error of the operating system becomes a message with a remedy."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
from tiny_config import REPO

from rl.ranks.signals import REMEDIES, SHARED, remedy, sentence


@pytest.mark.parametrize("number", REMEDIES)
def test_an_error_of_the_operating_system_becomes_a_message(number: int) -> None:
    message = sentence(OSError(number, os.strerror(number), "/a/file\x1b[2J"))
    assert message is not None
    assert message.startswith(f"this run cannot go on:\n  /a/file\\x1b[2J: {os.strerror(number)}; ")
    assert sentence(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None, "may be a bug"


def test_a_read_only_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's locks are files there; the error of the system has no path."""
    error = OSError(errno.EROFS, os.strerror(errno.EROFS))
    monkeypatch.setattr(os, "access", lambda path, mode: path != SHARED)
    assert remedy(error).startswith(f"{SHARED} cannot be written; mount it")


def test_a_command_that_cannot_print_fails() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "rl", "check", REPO / "configs/quickstart.jsonnet"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    [line] = done.stderr.strip().split("\n")
    assert done.returncode == 1 and "No space left on device" in line
