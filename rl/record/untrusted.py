"""Text from outside the process, made fit to be shown and to be written.

What: one escaped, shortened line of it for messages, logs and the screen; text without the halves
of surrogate pairs, which no UTF-8 file takes. What not: its meaning (`judge/reply.py`), keys
(`scrub.py`).
"""

from __future__ import annotations


def shown(text: str, max_chars: int) -> str:
    """`text` as one printable line of at most about `max_chars` characters.

    Line ends become spaces; whatever a terminal acts upon (control characters, ANSI sequences,
    changes of direction, invisible characters) becomes its escape.
    """
    line = " ".join(text[: 4 * max_chars].split())
    escaped = printable(line[: max_chars + 1])
    is_whole = len(text) <= 4 * max_chars and len(escaped) <= max_chars
    return escaped if is_whole else f"{escaped[:max_chars]}..."


def printable(text: str) -> str:
    """`text` with its line feeds, and the escape of whatever else a terminal acts upon."""
    return "".join(
        char
        if char.isprintable() or char == "\n"
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def without_lone_surrogates(text: str) -> str:
    """`text` with U+FFFD in place of each half of a surrogate pair, which JSON can spell and UTF-8
    cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
