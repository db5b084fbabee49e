"""An error of the operating system becomes a message with a remedy."""

from __future__ import annotations

import errno
import os

import pytest

from rl.ranks.error_messages import REMEDIES, sentence


@pytest.mark.parametrize("number", REMEDIES)
def test_an_error_of_the_operating_system_becomes_a_message(number: int) -> None:
    message = sentence(OSError(number, os.strerror(number), "/a/file\x1b[2J"))
    assert message is not None
    assert message.startswith(f"this run cannot go on:\n  /a/file\\x1b[2J: {os.strerror(number)}; ")
    assert sentence(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None, "may be a bug"
