"""Checks that a message contains certain parts, whatever its wording."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence

import pytest


def refusal(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> str:
    """What a command prints to stderr when it refuses its arguments."""
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        assert main(arguments) == 1
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
