"""Checks what a message names, whatever its wording."""

from __future__ import annotations


def names(message: object, parts: str) -> bool:
    """Whether the message holds each of `parts`, which ' ... ' separates, in any order."""
    return all(part in str(message) for part in parts.split(" ... "))
