"""Checks that a message contains certain parts, whatever its wording."""

from __future__ import annotations


def holds(message: object, parts: str) -> bool:
    """Whether the message contains each of the texts that ' ... ' separates, in any order."""
    return all(part in str(message) for part in parts.split(" ... "))
