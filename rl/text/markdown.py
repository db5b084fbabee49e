"""Escapes untrusted text for Markdown: no secrets, tags, links or code blocks."""

from __future__ import annotations

import json
import re
from typing import Any

from rl.text.scrub import scrub
from rl.text.untrusted import excerpt

MAX_CHARS = 300
_SPECIAL = re.compile(
    r"[&<>@$|\\~]"  # tags, mentions, formulas (the hub reads `\\(` as one), cells, strikethrough
    r"|(?<=:)//|(?i:(?<=www)\.)"  # a bare address becomes a link
    r"|[`*\[\]#]|(?<!\w)_|_(?!\w)"
)
_BACKSLASHED = "`*[]#_"


def text(value: object, max_chars: int = MAX_CHARS) -> str:
    """`value` on one line of at most about `max_chars` characters, escaped to show literally."""
    return _SPECIAL.sub(_escape, excerpt(str(value), max_chars))


def _escape(match: re.Match[str]) -> str:
    if match[0] in _BACKSLASHED:
        return rf"\{match[0]}"
    return "".join(f"&#{ord(char)};" for char in match[0])


def code(value: Any) -> list[str]:
    """`value` as a fenced block of JSON that no text in `value` can close."""
    dumped = scrub(json.dumps(value, indent=1))
    for char in "`<>&":
        dumped = dumped.replace(char, f"\\u{ord(char):04x}")
    return ["```json", *dumped.split("\n"), "```"]
