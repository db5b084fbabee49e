"""Escapes text from outside the process, so that it is safe to print on a terminal."""

from __future__ import annotations


def escaped(text: str, max_chars: int) -> str:
    """`text` as one printable line of at most about `max_chars` characters.

    Line ends become spaces. Whatever a terminal interprets (control characters, ANSI sequences,
    changes of direction, invisible characters) is replaced by a backslash escape.
    """
    line = " ".join(text[: 4 * max_chars].split())
    line = printable(line[: max_chars + 1])
    is_whole = len(text) <= 4 * max_chars and len(line) <= max_chars
    return line if is_whole else f"{line[:max_chars]}..."


def printable(text: str, keep: str = "") -> str:
    """`text` with all that a terminal interprets escaped, except the characters in `keep`."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii")
        for c in text
    )
