"""Checks that a message contains certain parts, whatever its wording."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest


def code_of(main: Callable[[Sequence[str]], Any], *arguments: str) -> object:
    """The exit code of a command, which returns it or ends Python with it."""
    try:
        return main([*arguments])
    except SystemExit as end:
        return end.code or 0


def refusal(main: Callable[[Sequence[str]], Any], arguments: Sequence[str], code: int = 1) -> str:
    """What a command prints to stderr when it refuses its arguments."""
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        assert code_of(main, *arguments) == code
    return stream.getvalue()


def holds(message: object, parts: str) -> bool:
    """Whether the message contains each of the texts that ' ... ' separates, in any order."""
    return all(part in str(message) for part in parts.split(" ... "))


@contextlib.contextmanager
def raising(error: type[Exception], parts: str) -> Iterator[None]:
    """Expects an error whose message holds these parts; '': none."""
    with pytest.raises(error) if parts else contextlib.nullcontext() as raised:
        yield
    assert not parts or holds(raised.value, parts), raised.value
