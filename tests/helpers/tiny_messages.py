"""Checks that a message contains certain parts, whatever its wording."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence


def refusal(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> str:
    """What a command prints to stderr when it refuses its arguments."""
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        assert main(arguments) == 1
    return stream.getvalue()


def holds(message: object, parts: str) -> bool:
    """Whether the message contains each of the texts that ' ... ' separates, in any order."""
    return all(part in str(message) for part in parts.split(" ... "))
