"""Text from outside the process, made fit to be shown and to be written.

What: one escaped, shortened line of it for messages, logs and the screen, keys scrubbed; text
without the halves of surrogate pairs, which no UTF-8 file takes. What not: its meaning
(`judge/reply.py`). What escapes all that is printed is `terminal.py`; here a message is cut.
"""

from __future__ import annotations

from rl.record.scrub import scrub


def shown(text: str, max_chars: int) -> str:
    """`text` as one printable line of at most about `max_chars` characters, without keys.

    Line ends become spaces; whatever a terminal acts upon (control characters, ANSI sequences,
    changes of direction, invisible characters) becomes its escape.
    """
    text = scrub(text)  # first: half a key, cut off, is not known as one
    line = " ".join(text[: 4 * max_chars].split())
    escaped_line = escaped(line[: max_chars + 1])
    is_whole = len(text) <= 4 * max_chars and len(escaped_line) <= max_chars
    return escaped_line if is_whole else f"{escaped_line[:max_chars]}..."


def escaped(text: str, but: str = "") -> str:
    """`text` with the escape of whatever a terminal acts upon, except the characters `but`."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in but else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def without_lone_surrogates(text: str) -> str:
    """`text` with U+FFFD in place of each half of a surrogate pair, which JSON can spell and UTF-8
    cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
