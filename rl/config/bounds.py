"""What no value of a config may be, whatever its key: the first look at plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl.config.printing import shown

MAX_NUMBER = 2**53
"""Beyond it Jsonnet's numbers are no longer exact; nothing here is counted or measured so large."""
MAX_CHARS = 100_000
"""Of one text; a system prompt is the longest."""
MAX_NAME_CHARS = 200
MAX_DEPTH = 32
MAX_SHOWN = 60


def hostile(value: Any, at: str = "") -> Iterator[str]:
    """'key: what is wrong, remedy' of every value under `value` that cannot be meant; `at` is the
    dotted key that holds it."""
    if at.count(".") >= MAX_DEPTH:
        yield f"{shown(at, MAX_SHOWN)}: nested more than {MAX_DEPTH} deep; no key is"
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if problem := _text_problem(name, MAX_NAME_CHARS):
                where = f"{at}.{shown(name, MAX_SHOWN)}" if at else shown(name, MAX_SHOWN)
                yield f"{where}: a key that {problem}"
            else:
                yield from hostile(item, f"{at}.{name}" if at else name)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from hostile(item, f"{at}.{index}")
    elif isinstance(value, str):
        if problem := _text_problem(value, MAX_CHARS):
            yield f"{at}: {shown(repr(value), MAX_SHOWN)} given, which {problem}"
    elif isinstance(value, (int, float)) and not _is_sane(value):
        yield (
            f"{at}: {_number(value)} given, must be a finite number of at most 2^53 (9e15) in size"
        )


def _text_problem(text: str, max_chars: int) -> str:
    if len(text) > max_chars:
        return f"has {len(text)} characters; write at most {max_chars}"
    if "\0" in text:
        return "holds a NUL, which no path, name or command takes; drop it"
    if any("\ud800" <= char <= "\udfff" for char in text):
        return "holds half a character (a lone surrogate); write it as UTF-8"
    return ""


def _is_sane(value: float) -> bool:
    return abs(value) <= MAX_NUMBER  # neither NaN nor infinity is


def _number(value: float) -> str:
    if isinstance(value, int) and value.bit_length() > 1000:  # Python spells at most 4,300 digits
        return f"a number of {value.bit_length()} bits"
    return f"{float(value):g}"
