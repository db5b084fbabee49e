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
    text = _FRACTION.sub(r"\1\2/\3", _DEGREES.sub("°", text))
    return _SPACES.sub(" ", text).strip()


def compare(gold: str, answer: str) -> bool | None:
    """Whether two bare answers are equal; None if only the mathematical verifier can tell."""
    plain_gold, plain_answer = plain(gold), plain(answer)
    if plain_gold == plain_answer:
        return True
    by_choice = _compare_choices(plain_gold, plain_answer)
    if by_choice is not None:
        return by_choice
    quantities = read_quantity(plain_gold), read_quantity(plain_answer)
    if quantities[0] and quantities[1]:
        return same_quantity(quantities[0], quantities[1])
    if is_formula(gold) and not _has_words(answer):
        return None
    return _normalized(plain_gold) == _normalized(plain_answer) != ""


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
    """Whether a bare gold answer is a formula and neither a plain quantity nor an option."""
    text = plain(gold)
    return is_formula(gold) and not read_quantity(text) and not _choice(text)[1]


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
