"""Compares answers by their text, as far as that is possible without a formula parser."""

from __future__ import annotations

import re
import unicodedata

from rl.rewards.accuracy.units import read_quantity, same_quantity

_WRAPPERS = (
    ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"),
    ('"', '"'), ("'", "'"), (r"\boxed{", "}"), (r"\fbox{", "}"), (r"\text{", "}"),
    (r"\textbf{", "}"), (r"\mathrm{", "}"), (r"\mathbf{", "}"),
)  # fmt: skip
_LEAD_IN = re.compile(
    r"(?:so |thus |therefore )?,?\s*(?:the |my )?(?:correct |final )?(?:answer|option|choice)"
    r"(?: is)?\s*:?\s+(?=\S)",
    re.IGNORECASE,
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\[,;:! ]|~|\\quad|\\qquad|\s+")
_DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree|\s+°")
_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_BARE_CHOICE = re.compile(r"[(\[]?([A-Ja-j])[)\].:]*")
_CHOICE = re.compile(r"[(\[]?([A-J])[)\].:]\s*(\S.*)", re.DOTALL)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{3,}")
_AND = re.compile(r",?\s*(?:\\(?:text|mathrm)\s*\{\s*and\s*\}|\band\b)\s*")
_FUNCTIONS = "arcsin arccos arctan sqrt sin cos tan cot sec csc log ln exp min max det gcd lcm pi"
_FUNCTION = re.compile(rf"(?<![\\A-Za-z])({'|'.join(_FUNCTIONS.split())})(?=[\W\d_]|$)")
_OPERATOR = re.compile(r"[\d\\=<>+*/^|≤≥≠√π±∞-]")
_PUNCTUATION = re.compile(r"[^\w\s](?!\d)")
_DASH = re.compile(r"\s*[-\u2010-\u2015\u2212]\s*|(?<=\d)\s+to\s+(?=\d)")
_SUBSCRIPT = re.compile(r"(?<=[A-Za-z])_\{?(\d+)\}?")
_LOW_DIGITS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_JOINED = r"\d+(?:\.\d+)?(?:\s?[-:]\s?\d+(?:\.\d+)?)+|\d+(?:[./]\d+){2,}"
_NUMBERS = re.compile(
    rf"(?P<parts>(?:{_JOINED})(?:\s*,\s*(?:{_JOINED}))*)"
    r"(?:\s+(?P<unit>[A-Za-z°%][^\d]*)|\s*(?P<half>[ap]\.?m\.?))?",
    re.IGNORECASE,
)
"""Scores, ranges, times, dates, versions, telephone numbers: 3-1, 10:30 am, 5/6/2021, 1.2.3."""
_CODE = re.compile(
    r"(?=.*[A-Za-z])(?=.*\d)(?!\d+[a-z]+$)(?![a-z]-)[A-Za-z0-9]+(?:-[A-Z0-9]+)*"
    r"|\d+(?:st|nd|rd|th|s|k|am|pm)|(?:[A-Za-z]{1,3}|\d+)[+#*]{1,2}|[A-Za-z]{1,3}-"
    r"|[A-Z]{1,4}(?:[/&][A-Z]{1,4})+"
)
"""B2, H2O, F-16, 5th, C#, A+, AC/DC; not 2x and x-1, which are formulas."""
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_MONTH, _DAY = rf"({'|'.join(_MONTHS)})[a-z]*\.?", r"(\d{1,2})(?:st|nd|rd|th)?"
_NAMED = (
    re.compile(rf"{_MONTH} {_DAY},? (\d{{4}})", re.IGNORECASE),
    re.compile(rf"{_DAY}(?: of)? {_MONTH},? (\d{{4}})", re.IGNORECASE),
)
_AS_LATEX = (
    ("**", "^"), ("²", "^{2}"), ("³", "^{3}"), ("°", r"^{\circ}"), ("\u00d7", r"\times "),
    ("·", r"\cdot "), ("÷", "/"), ("\u2212", "-"), ("≤", r"\le "), ("≥", r"\ge "), ("≠", r"\ne "),
    ("<=", r"\le "), (">=", r"\ge "), ("!=", r"\ne "), ("∞", r"\infty "), ("±", r"\pm "),
    ("π", r"\pi "),
)  # fmt: skip


def bare(text: str) -> str:
    """The answer without wrappers: dollars, boxes, quotes, 'the answer is', a final full stop."""
    text = " ".join(text.split())  # also keeps the regexes below linear in the text's length
    previous = None
    while text != previous:
        previous = text
        text = text.strip()
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            if len(text) > len(opening + closing) and text == opening + inner + closing:
                text = inner if _is_one_pair(inner, opening, closing) else text
        if text.endswith((".", "。")) and not text.endswith(".."):
            text = text[:-1]
        if text.count("$") % 2 == 0 and r"\$" not in text and not text.startswith("$$"):
            text = text.replace("$", "")  # $ pairs mark several formulas; a single $ is money
        lead_in = _LEAD_IN.match(text)
        if lead_in:
            text = text[lead_in.end() :]
    return text


def _is_one_pair(inner: str, opening: str, closing: str) -> bool:
    """Whether the delimiters belong together: no in `$1$ or $2$` and `\\text{a} \\text{b}`."""
    if closing != "}":
        return opening not in inner and closing not in inner
    depth = 0
    for char in inner:
        depth += (char == "{") - (char == "}")
        if depth < 0:
            return False
    return depth == 0


def plain(text: str) -> str:
    """A bare answer without LaTeX markup for text, spaces, signs and fractions of integers."""
    text = _TEXT.sub(r" \1 ", text).replace(r"\left", "").replace(r"\right", "")
    text = text.replace(r"\%", "%").replace(r"\$", "$")
    text = re.sub(r"^\\?#(?=\d)", "", text)  # a shirt's number: #5
    text = _FRACTION.sub(r"\1\2/\3", _DEGREES.sub("°", text))
    return _SPACES.sub(" ", text).strip()


def compare(gold: str, answer: str) -> bool | None:
    """Whether two bare answers are equal; None if only the mathematical verifier can tell. The
    gold's kind decides how: text, an option, a date, a number with its unit, a literal (a score, a
    code, ...), a formula."""
    plain_gold, plain_answer = plain(gold), plain(answer)
    if is_same_text(plain_gold, plain_answer):
        return True
    dates = _date(plain_gold), _date(plain_answer)
    if dates[0] and dates[1]:
        return dates[0] == dates[1]
    by_choice = _compare_choices(plain_gold, plain_answer)
    if by_choice is not None:
        return by_choice
    quantities = read_quantity(plain_gold), read_quantity(plain_answer)
    if quantities[0] and quantities[1]:
        return same_quantity(quantities[0], quantities[1])
    literal, answered = _literal(plain_gold), _literal(plain_answer)
    if literal or answered:
        return literal is not None and answered is not None and _same_literal(literal, answered)
    if is_formula(gold) and not _has_words(answer):
        return None
    return _normalized(plain_gold) == _normalized(plain_answer) != ""


def is_same_text(gold: str, answer: str) -> bool:
    """Whether two answers are the same characters, but for case and spaces. (NFKC would make 10²
    and 102 the same.)"""
    folded = (unicodedata.normalize("NFC", text).casefold().split() for text in (gold, answer))
    return next(folded) == next(folded)


def _literal(text: str) -> tuple[str, str] | None:
    """(normal form, unit) of an answer that means its characters, although a parser would read a
    formula: 3-1 is a score, not 2, and B2 is not 2B. None for other answers."""
    if read_quantity(text):
        return None
    text = _SUBSCRIPT.sub(r"\1", text).replace("\\#", "#").translate(_LOW_DIGITS)
    text = _DASH.sub("-", text).rstrip("!?,;: ")
    if numbers := _NUMBERS.fullmatch(text):
        parts = re.findall(r"\d+(?:\.\d+)?(?=[-:,\s]|$)|\d+|,", numbers["parts"])
        unit = re.sub(r"[\s.]", "", numbers["unit"] or numbers["half"] or "")
        # 05/06 is 5/6, but a telephone number keeps its zeros.
        parts = [str(int(part)) if re.fullmatch(r"0\d", part) else part for part in parts]
        return "-".join(parts), unit.casefold()
    text = text.replace(" ", "-")
    if _CODE.fullmatch(text) and not _FUNCTION.search(text):
        return re.sub(r"-(?=\w)", "", text).casefold(), ""
    return None


def _same_literal(gold: tuple[str, str], answer: tuple[str, str]) -> bool:
    """As for quantities, a unit that only one of them has is ignored."""
    return gold[0] == answer[0] and (gold[1] == answer[1] or not (gold[1] and answer[1]))


def _date(text: str) -> tuple[int, int, int] | None:
    """(year, month, day); None if it is no date, or if day and month could be confused."""
    for number, pattern in enumerate(_NAMED):
        if found := pattern.fullmatch(text):
            month, day = found[1 + number], found[2 - number]
            return int(found[3]), 1 + _MONTHS.index(month[:3].lower()), int(day)
    numbers = re.fullmatch(r"(\d{4}|\d{1,2})([-/.])(\d{1,2})\2(\d{4}|\d{1,2})", text)
    if not numbers:
        return None
    first, second, third = (int(numbers[n]) for n in (1, 3, 4))
    if first > 31:
        return first, second, third
    if third <= 31 or (first <= 12 and second <= 12 and first != second):
        return None
    return (third, second, first) if first > 12 or first == second else (third, first, second)


def _compare_choices(gold: str, answer: str) -> bool | None:
    """`compare` for multiple choice; None if neither answer names an option by its letter."""
    gold_letter, gold_text = _choice(gold)
    letter, text = _choice(answer)
    if gold_letter and letter:
        same_text = not (gold_text and text) or compare(gold_text, text) is not False
        return gold_letter.upper() == letter.upper() and same_text
    if gold_letter and gold_letter.isupper():
        return bool(gold_text) and compare(gold_text, answer) is True
    if text and not _choice(text)[0]:  # recurse once: a long 'A. A. A. ...' is not an option
        return compare(gold, text)
    return None


def _choice(text: str) -> tuple[str, str]:
    """(option letter, option text); each is '' if the answer has none."""
    match = _BARE_CHOICE.fullmatch(text)
    if match:
        return match[1], ""
    match = _CHOICE.fullmatch(text)
    return (match[1], match[2]) if match else ("", "")


def is_formula(text: str) -> bool:
    """Whether a bare answer is a formula: it has a digit or an operator, and no words."""
    return bool(_OPERATOR.search(text)) and not _has_words(text)


def _has_words(text: str) -> bool:
    """Words are not a formula: a parser reads `blue` as the product b l u e, equal to `lube`."""
    without_names = _FUNCTION.sub(" ", _COMMAND.sub(" ", _AND.sub(" ", text)))
    return "$" in text or bool(_WORD.search(without_names))


def needs_verifier(gold: str) -> bool:
    """Whether a bare gold answer is a formula and no quantity, literal or option."""
    text = plain(gold)
    known = read_quantity(text) or _literal(text) or _choice(text)[1]
    return is_formula(gold) and not known


def as_latex(text: str) -> str:
    """A bare answer in the LaTeX notation that the verifier reads."""
    text = _SPACES.sub(" ", _AND.sub(", ", text))
    text = _FUNCTION.sub(lambda match: rf"\{match[1]} ", text)
    for symbol, latex in _AS_LATEX:
        text = text.replace(symbol, latex)
    text = re.sub(r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}", text)
    return re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)


def _normalized(text: str) -> str:
    """Normalize case, spaces and Unicode form; drop punctuation, except before a digit."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(_PUNCTUATION.sub(" ", text).split())
