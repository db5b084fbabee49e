"""Checks that a message contains certain parts, whatever its wording."""

from __future__ import annotations


def names(message: object, parts: str) -> bool:
    """Whether the message contains all of `parts`, separated by ' ... ', in any order."""
    return all(part in str(message) for part in parts.split(" ... "))
