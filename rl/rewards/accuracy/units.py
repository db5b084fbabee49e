"""Reads numbers with units as exact fractions: '1,200.5 cm', '50%', '1 1/2'."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_NUMBER_CHARS = 60
RELATIVE_TOLERANCE = Fraction(1, 10**6)
"""0.333333 equals 1/3. Whole numbers are compared exactly."""

_SYMBOLS = {
    "°": ("degree", "deg"),
    "m": ("meter", "metre"),
    "cm": ("centimeter", "centimetre"),
    "mm": ("millimeter", "millimetre"),
    "km": ("kilometer", "kilometre"),
    "in": ("inch", "inches"),
    "ft": ("foot", "feet"),
    "mi": ("mile",),
    "g": ("gram",),
    "kg": ("kilogram",),
    "mg": ("milligram",),
    "s": ("second", "sec"),
    "min": ("minute",),
    "h": ("hour", "hr"),
    "L": ("liter", "litre", "l"),
    "mL": ("milliliter", "millilitre", "ml"),
    "$": ("dollar", "usd"),
    "€": ("euro", "eur"),
    "%": ("percent", "percentage", "pct"),
}
_SYMBOL_OF = {
    unit: symbol
    for symbol, names in _SYMBOLS.items()
    for name in names
    for unit in (name, f"{name}s")
}
_KNOWN_SYMBOLS = frozenset(
    ("°C", "°F", "K", "N", "J", "W", "V", "A", "Hz", "Pa", "lb", "m/s", "km/h", "cm/s", "£", "¥")
).union(_SYMBOLS)
_POWERS = {"square ": "^2", "sq ": "^2", "sq. ": "^2", "cubic ": "^3"}
_NO_UNITS = frozenset(
    ("hundred", "thousand", "million", "billion", "dozen", "half", "third", "quarter")
).union(("and", "plus", "minus", "times", "over", "not", "squared", "cubed"))
"""Words that change the number and are not units."""
_PLURAL = re.compile(r"(?<=ss)es$|(?<=[cs]h)es$|(?<=x)es$|(?<!s)s$")

_NUMBER = re.compile(
    r"""(?P<currency>[$€£¥])?\s*(?P<sign>[+-])?\s*(?P<currency2>[$€£¥])?\s*
    (?: (?P<whole>\d+)\s+(?P<over>\d+)/(?P<under>\d+)
      | (?P<numerator>\d+)\s*/\s*(?P<denominator>\d+)
      | 10\s*\^\s*\{?(?P<ten>[+-]?\d{1,3})\}?
      | (?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)
        (?:(?:[eE]|\s*(?:\\times|\\cdot|[*x\u00d7·])\s*10\s*(?:\^|\*\*)\s*\{?)
        (?P<power>[+-]?\d{1,3})\}?)?
    )
    (?P<space>\s*)(?P<unit>[^\d\s].*)?""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Quantity:
    """A number with its unit."""

    number: Fraction
    unit: str
    """'' if there is none; '%' and '$' are units."""


def read_quantity(text: str) -> Quantity | None:
    """The quantity if the whole text is one, else None."""
    if len(text) > MAX_NUMBER_CHARS or not text.isprintable():
        return None
    match = _NUMBER.fullmatch(text.strip().replace("\u2212", "-"))
    if match is None:
        return None
    number = _number(match)
    unit = _unit(match["unit"] or "", bool(match["space"]))
    currency = match["currency"] or match["currency2"] or ""
    if number is None or unit is None or (unit and currency):
        return None
    return Quantity(-number if match["sign"] == "-" else number, unit or currency)


def _number(match: re.Match[str]) -> Fraction | None:
    if match["ten"]:
        return Fraction(10) ** int(match["ten"])
    if match["digits"]:
        power = Fraction(10) ** int(match["power"] or 0)
        return Fraction(match["digits"].replace(",", "").rstrip(".")) * power
    over, under = match["over"] or match["numerator"], match["under"] or match["denominator"]
    if int(under) == 0:
        return None
    return Fraction(int(match["whole"] or 0)) + Fraction(int(over), int(under))


def _unit(text: str, has_space: bool) -> str | None:
    """A unit in its standard form; None if the text after the number is not a unit, such as `x` in
    `5x`. A unit of a single letter or of words (at most three) needs a space before it."""
    unit = text.strip().rstrip(".").replace("²", "^2").replace("³", "^3")
    unit = unit.replace("{", "").replace("}", "")
    for word, power in _POWERS.items():
        if unit.lower().startswith(word):
            unit = unit[len(word) :] + power
    base, hat, power = unit.partition("^")
    if not base or (hat and power not in ("2", "3")):
        return None if unit else ""
    symbol = _SYMBOL_OF.get(base.lower(), base)
    if symbol in _KNOWN_SYMBOLS:
        is_bare_letter = len(symbol) == 1 and symbol.isalpha()
        return symbol + hat + power if has_space or not is_bare_letter else None
    words = base.lower().split()
    is_words = has_space and 1 <= len(words) <= 3 and all(w.isalpha() and len(w) > 2 for w in words)
    if not is_words or _NO_UNITS & set(words):
        return None
    return " ".join(_PLURAL.sub("", word) for word in words) + hat + power


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Whether number and unit are the same. A unit that only one of them has is ignored, but a
    percentage equals a plain gold only as a fraction of 1; 50 % may also be written 50 or 0.5."""
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if _same_number(gold.number, answer.number):
        return bool(gold.unit) or answer.unit != "%" or gold.number == 0
    units = {gold.unit, answer.unit}
    if units != {"%", ""}:
        return False
    percents, share = (gold, answer) if gold.unit == "%" else (answer, gold)
    return _same_number(percents.number / 100, share.number)


def _same_number(gold: Fraction, answer: Fraction) -> bool:
    if gold.denominator == answer.denominator == 1:
        return gold == answer
    return abs(gold - answer) <= RELATIVE_TOLERANCE * max(abs(gold), abs(answer))
