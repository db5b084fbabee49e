"""Text from outside the process, made fit to be shown on one line or to be written as UTF-8."""

from __future__ import annotations

from rl.config import printing
from rl.text.scrub import scrub


def shown(text: str, max_chars: int) -> str:
    """`printing.shown` without keys, which are replaced first: half a key would not be
    recognised."""
    return printing.shown(scrub(text), max_chars)


def without_lone_surrogates(text: str) -> str:
    """`text` with U+FFFD for each half of a surrogate pair, which JSON can write and UTF-8
    cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
