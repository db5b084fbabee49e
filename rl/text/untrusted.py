"""Makes text from outside the process safe to print on one line or to write as UTF-8."""

from __future__ import annotations

from rl.config import printing
from rl.text.scrub import scrub


def excerpt(text: str, max_chars: int) -> str:
    """`printing.escaped` of the scrubbed text. Scrubbed before it is cut, because `scrub` would not
    recognise half a secret."""
    return printing.escaped(scrub(text), max_chars)


def without_lone_surrogates(text: str) -> str:
    """`text` with U+FFFD for each unpaired surrogate, which JSON can encode and UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
