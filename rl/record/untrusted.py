"""Text from outside the process, made fit to be shown and to be written.

What: one escaped, shortened line of it for messages, logs and the screen (`config/printing.py`,
which the lowest room needs too); text without the halves of surrogate pairs, which no UTF-8 file
takes. What not: its meaning (`judge/reply.py`), keys (`scrub.py`).
"""

from __future__ import annotations

from rl.config.printing import printable, shown

__all__ = ["printable", "shown", "without_lone_surrogates"]


def without_lone_surrogates(text: str) -> str:
    """`text` with U+FFFD in place of each half of a surrogate pair, which JSON can spell and UTF-8
    cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
