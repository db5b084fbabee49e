"""Keys and tokens live in the environment only; this keeps them out of everything we write.

What: `scrub`, applied to every text that goes into the run folder, to the terminal, to wandb or to
the hub. A key gets there by accident: an endpoint echoes it in its 401 body or spells it anew in a
`Location`, a config writes it out with `std.extVar`. What not: which values are keys
(`secrets.py`); a licence to put keys into configs.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from functools import lru_cache
from html import unescape
from typing import Any

from rl.record.secrets import MIN_CHARS, secrets

MAX_NESTED = 4
"""Spellings within spellings that are looked through: JSON in JSON in a URL."""

_ESCAPE = re.compile(
    r"""\\+(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|([\\/"'bfnrt]))|%([0-9a-fA-F]{2})|"""
    r"(&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|amp|lt|gt|quot|apos);)|"
    ""
    r"[\0\u00ad\u200b-\u200f\u2060\ufeff]+"
)
"""One character as JSON and Python (however often quoted), as a URL, as HTML spells it; and what is
not seen between two (UTF-16 read as bytes, soft hyphens)."""
_CONTROL = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_BASE64_RUN = re.compile(r"[A-Za-z0-9+/]{10,}={0,2}")
"""Ten signs stand for what is certain of a secret of eight bytes."""


def scrub(text: str, also_names: tuple[str, ...] = ()) -> str:
    """`text` with every secret of the environment (`secrets.py`) replaced by `<NAME>`.

    However it is spelt: in any case, percent-encoded, escaped as in JSON, Python or HTML, all of it
    or some characters, as hexadecimal digits, as base64 of itself or of something around it
    (`Bearer ...`, `user:...`), and each of these within another. What is JSON stays JSON.
    """
    return _scrub(text, _needles(secrets(also_names)))


def scrubbed(value: Any, also_names: tuple[str, ...] = ()) -> Any:
    """`scrub` applied to every string, keys included, in nested dicts, lists and tuples."""
    return _scrubbed(value, _needles(secrets(also_names)))


def _scrubbed(value: Any, needles: tuple[_Needle, ...]) -> Any:
    if isinstance(value, (int, float)):  # most of an episode
        return value
    if isinstance(value, str):
        return _scrub(value, needles)
    if isinstance(value, dict):
        return {_scrubbed(k, needles): _scrubbed(v, needles) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_scrubbed(item, needles) for item in value]
    return value


def _scrub(text: str, needles: tuple[_Needle, ...]) -> str:
    if not needles or len(text) < MIN_CHARS:
        return text
    layers = [text]
    while len(layers) <= MAX_NESTED:
        decoded = _ESCAPE.sub(_character, layers[-1])
        if decoded == layers[-1]:
            break
        layers.append(decoded)
    if not any(_has(layer, needles) for layer in layers):
        return text
    return _replaced(text, len(layers), needles)


@dataclass(frozen=True)
class _Needle:
    """What is looked for of one secret."""

    name: str
    plain: tuple[str, ...]
    """Lower case."""
    base64: tuple[str, ...]
    """What base64 makes of it at each of the three places in a group of bytes, without the signs at
    the ends that depend on its neighbours."""


@lru_cache(maxsize=8)
def _needles(found: tuple[tuple[str, str], ...]) -> tuple[_Needle, ...]:
    needles = []
    for name, secret in found:
        data = secret.encode("utf-8", "surrogateescape")
        plain = {secret, _ESCAPE.sub(_character, secret), secret.replace(" ", "+")}
        plain |= {data.decode("latin-1"), data.hex()}
        lowered = tuple(sorted({_lower(form) for form in plain if len(form) >= MIN_CHARS}))
        needles.append(_Needle(name, lowered, tuple(_base64_core(data, i) for i in range(3))))
    return tuple(needles)


def _base64_core(data: bytes, offset: int) -> str:
    """The signs that stand for bits of `data` alone, when `offset` bytes come before it."""
    signs = base64.b64encode(bytes(offset) + data + bytes(3)).decode("ascii")
    return signs[-(-8 * offset // 6) : (8 * (offset + len(data))) // 6]


def _lower(text: str) -> str:
    """Every character keeps its place, which a Turkish I would not."""
    lower = text.lower()
    return lower if len(lower) == len(text) else text.replace("\u0130", "i").lower()


def _as_standard(text: str) -> str:
    """Base64 of URLs as the usual one."""
    return text.replace("-", "+").replace("_", "/")


def _has(layer: str, needles: tuple[_Needle, ...]) -> bool:
    lower, standard = _lower(layer), _as_standard(layer)
    return any(
        any(form in lower for form in needle.plain)
        or any(form in standard for form in needle.base64)
        for needle in needles
    )


def _character(found: re.Match[str]) -> str:
    """What an escape stands for."""
    unicode, byte, short, percent, entity = found.groups()
    if short is not None:
        return _CONTROL.get(short, short)
    if entity is not None:
        return unescape(entity)
    code = unicode or byte or percent
    return chr(int(code, 16)) if code else ""


def _replaced(text: str, num_layers: int, needles: tuple[_Needle, ...]) -> str:
    """`text` with each place replaced that any layer shows to be a secret. Slow: few texts hold
    one."""
    layer, starts = text, list(range(len(text) + 1))  # where in `text` each character begins
    spans: list[tuple[int, int, str]] = []
    for _ in range(num_layers):
        spans += [(starts[a], starts[b], name) for a, b, name in _spans(layer, needles)]
        layer, starts = _decoded(layer, starts)
    pieces, end = [], 0
    for start, stop, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        if start >= end:
            pieces += [text[end:start], f"<{name}>"]
        end = max(end, stop)
    return "".join([*pieces, text[end:]])


def _spans(layer: str, needles: tuple[_Needle, ...]) -> list[tuple[int, int, str]]:
    lower, standard = _lower(layer), _as_standard(layer)
    spans = []
    for needle in needles:
        for form in needle.plain:
            for found in re.finditer(re.escape(form), lower):
                spans.append((found.start(), found.end(), needle.name))
    for found in _BASE64_RUN.finditer(standard):  # all of it: what stands around a key is its own
        for needle in needles:
            if any(form in found[0] for form in needle.base64):
                spans.append((*found.span(), needle.name))
                break
    # An escape is replaced as a whole or not at all, or what is left would be no JSON.
    whole = {i: found.span() for found in _ESCAPE.finditer(layer) for i in _within(found)}
    return [
        (whole.get(start, (start,))[0], whole.get(stop, (stop,))[-1], name)
        for start, stop, name in spans
    ]


def _within(found: re.Match[str]) -> range:
    return range(found.start() + 1, found.end())


def _decoded(layer: str, starts: list[int]) -> tuple[str, list[int]]:
    """The next layer, and where in the text each of its characters begins."""
    pieces, places, end = [], [], 0
    for found in _ESCAPE.finditer(layer):
        character = _character(found)
        pieces += [layer[end : found.start()], character]
        places += starts[end : found.start()] + [starts[found.start()]] * len(character)
        end = found.end()
    return "".join([*pieces, layer[end:]]), places + starts[end:]
