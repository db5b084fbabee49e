"""Rewards of a text answer: is it right, and is it in its tags."""

from __future__ import annotations

import asyncio
import re
import time
import unicodedata
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from rl.api.plugin import PluginConfig, Resources
from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput
from rl.rewards.maths import MathsProcess

# ---- tags ----------------------------------------------------------------------------------------
# Finds `<name>...</name>` blocks in a completion.


def last_block(text: str, name: str) -> str | None:
    """The content of the last complete block of this name; None if there is none."""
    end = text.rfind(f"</{name}>")
    start = text.rfind(f"<{name}>", 0, max(end, 0))
    return None if start < 0 else text[start + len(name) + 2 : end]


# ---- values --------------------------------------------------------------------------------------
# Reads answers that are no formulas: numbers with units as exact fractions ('1,200.5 cm', '50%',
# '1 1/2'), dates, and what means its characters (a score, a code).

MAX_NUMBER_CHARS = 60
RELATIVE_TOLERANCE = Fraction(1, 10**6)
"""0.333333 equals 1/3. Whole numbers are compared exactly."""

_UNITS = """
° degree deg
m meter metre
cm centimeter centimetre
mm millimeter millimetre
km kilometer kilometre
in inch inches
ft foot feet
mi mile
g gram
kg kilogram
mg milligram
s second sec
min minute
h hour hr
L liter litre l
mL milliliter millilitre ml
$ dollar usd
€ euro eur
% percent percentage pct
"""
"""A symbol and its names on each line; names may end in s."""
_OTHER_SYMBOLS = "°C °F K N J W V A Hz Pa lb m/s km/h cm/s £ ¥"
_SYMBOL_OF = {symbol: symbol for symbol in _OTHER_SYMBOLS.split()}
for _symbol, *_names in map(str.split, _UNITS.strip().split("\n")):
    _SYMBOL_OF |= {unit: _symbol for name in _names for unit in (name, f"{name}s")}
    _SYMBOL_OF[_symbol] = _symbol
_POWERS = {"square ": "^2", "sq ": "^2", "sq. ": "^2", "cubic ": "^3"}
_NO_UNITS = frozenset(
    ("hundred", "thousand", "million", "billion", "dozen", "half", "third", "quarter")
).union(("and", "plus", "minus", "times", "over", "not", "squared", "cubed"))
"""Words that change the number and are not units."""
_PLURAL = re.compile(r"(?<=ss)es$|(?<=[cs]h)es$|(?<=x)es$|(?<!s)s$")

_TIMES = re.compile(r"(?<=[\d.])\s*(?:\\times|\\cdot|[*x\u00d7·])\s*10\s*(?:\^|\*\*)")
_TEN = re.compile(r"(?<![\d.,])10\s*\^")
_EXPONENT = re.compile(r"e\s*\{?([+-]?\d+)\}?")
_NUMBER = re.compile(
    r"""(?P<currency>[$€£¥])?\s*(?P<sign>[+-])?\s*(?P<currency2>[$€£¥])?\s*
    (?:(?P<whole>\d+)\s+(?=\d+/))?
    (?P<number>\d+\s*/\s*\d+
      | (?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?
    )
    (?P<space>\s*)(?P<unit>[^\d\s].*)?""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Value:
    """What an answer means that is no formula."""

    content: Fraction | str
    """A number, or the normal form of a date, a score, a code, ..."""
    unit: str
    """'' if there is none; '%' and '$' are units."""


def read_value(text: str) -> Value | None:
    """The value if the whole text is one, else None."""
    return _quantity(text) or _literal(text)


def _quantity(text: str) -> Value | None:
    if len(text) > MAX_NUMBER_CHARS or not text.isprintable():
        return None
    text = _TEN.sub("1e", _TIMES.sub("e", text.strip().replace("\u2212", "-")))
    match = _NUMBER.fullmatch(_EXPONENT.sub(r"e\1", text))
    if match is None:
        return None
    unit = _unit(match["unit"] or "", bool(match["space"]))
    currency = match["currency"] or match["currency2"] or ""
    if unit is None or (unit and currency):
        return None
    digits = re.sub(r"[\s,]", "", match["number"])
    try:
        number = Fraction(match["whole"] or 0) + Fraction(digits)
    except ZeroDivisionError:
        return None
    return Value(-number if match["sign"] == "-" else number, unit or currency)


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
    if symbol := _SYMBOL_OF.get(base) or _SYMBOL_OF.get(base.lower()):
        is_bare_letter = len(symbol) == 1 and symbol.isalpha()
        return symbol + hat + power if has_space or not is_bare_letter else None
    words = base.lower().split()
    is_words = has_space and 1 <= len(words) <= 3 and all(w.isalpha() and len(w) > 2 for w in words)
    if not is_words or _NO_UNITS & set(words):
        return None
    return " ".join(_PLURAL.sub("", word) for word in words) + hat + power


def same_value(gold: Value, answer: Value) -> bool:
    """Whether content and unit are the same. A unit that only one of them has is ignored, but a
    percentage equals a plain gold only as a fraction of 1; 50 % may also be written 50 or 0.5."""
    units = {gold.unit, answer.unit}
    if "" not in units and len(units) == 2:
        return False
    first, second = gold.content, answer.content
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    if _same_number(first, second):
        return bool(gold.unit) or answer.unit != "%" or first == 0
    if units != {"%", ""}:
        return False
    percents, share = (first, second) if gold.unit == "%" else (second, first)
    return _same_number(percents / 100, share)


def _same_number(gold: Fraction, answer: Fraction) -> bool:
    if gold.denominator == answer.denominator == 1:
        return gold == answer
    return abs(gold - answer) <= RELATIVE_TOLERANCE * max(abs(gold), abs(answer))


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


def _literal(text: str) -> Value | None:
    """An answer that means its characters, although a parser would read a formula: 3-1 is a score,
    not 2, and B2 is not 2B. None for other answers."""
    text = _SUBSCRIPT.sub(r"\1", text).replace("\\#", "#").translate(_LOW_DIGITS).rstrip("!?,;: ")
    if date := _date(text):
        return Value(date, "")
    text = _DASH.sub("-", text)
    if numbers := _NUMBERS.fullmatch(text):
        parts = re.findall(r"\d+(?:\.\d+)?(?=[-:,\s]|$)|\d+|,", numbers["parts"])
        unit = re.sub(r"[\s.]", "", numbers["unit"] or numbers["half"] or "")
        # 05/06 is 5/6, but a telephone number keeps its zeros.
        parts = [str(int(part)) if re.fullmatch(r"0\d", part) else part for part in parts]
        return Value("-".join(parts), unit.casefold())
    text = text.replace(" ", "-")
    if _CODE.fullmatch(text) and not _FUNCTION.search(text):
        return Value(re.sub(r"-(?=\w)", "", text).casefold(), "")
    return None


_DATE_FORMATS = (
    "%b %d %Y", "%d %b %Y", "%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%d-%m-%Y", "%d/%m/%Y", "%d.%m.%Y",
    "%m-%d-%Y", "%m/%d/%Y", "%m.%d.%Y",
)  # fmt: skip


def _date(text: str) -> str | None:
    """Year-month-day; None if it is no date, or if day and month could be confused."""
    text = re.sub(r"(?<=\d)(?:st|nd|rd|th)?(?: of)?(?=[ ,])|,|(?<=[a-z])\.", "", text)
    text = re.sub(r"([A-Za-z]{3})[a-z]*", r"\1", text)
    dates = set()
    for form in _DATE_FORMATS:
        with suppress(ValueError):
            dates.add(f"{datetime.strptime(text, form):%Y-%m-%d}")
    return dates.pop() if len(dates) == 1 else None


# ---- answers -------------------------------------------------------------------------------------
# Compares answers by their text, as far as that is possible without a formula parser.

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
_CHOICE = re.compile(r"[(\[]?(?:([A-Ja-j])[)\].:]*|([A-J])[)\].:]\s*(\S.*))", re.DOTALL)
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
    if closing == "}":
        return up_to_closing_brace(inner + "}") == inner
    return opening not in inner and closing not in inner


def up_to_closing_brace(text: str) -> str | None:
    """The text up to the brace that closes one opened just before it; None if it stays open."""
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[: brace.start()]
    return None


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
    by_choice = _compare_choices(plain_gold, plain_answer)
    if by_choice is not None:
        return by_choice
    value, answered = read_value(plain_gold), read_value(plain_answer)
    if value and answered:
        return same_value(value, answered)
    # A number may still equal a formula.
    if any(each and isinstance(each.content, str) for each in (value, answered)):
        return False
    if is_formula(gold) and not _has_words(answer):
        return None
    return _normalized(plain_gold) == _normalized(plain_answer) != ""


def is_same_text(gold: str, answer: str) -> bool:
    """Whether two answers are the same characters, but for case and spaces. (NFKC would make 10²
    and 102 the same.)"""
    folded = (unicodedata.normalize("NFC", text).casefold().split() for text in (gold, answer))
    return next(folded) == next(folded)


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
    match = _CHOICE.fullmatch(text)
    return (match[1] or match[2], match[3] or "") if match else ("", "")


def is_formula(text: str) -> bool:
    """Whether a bare answer is a formula: it has a digit or an operator, and no words."""
    return bool(_OPERATOR.search(text)) and not _has_words(text)


def _has_words(text: str) -> bool:
    """Words are not a formula: a parser reads `blue` as the product b l u e, equal to `lube`."""
    without_names = _FUNCTION.sub(" ", _COMMAND.sub(" ", _AND.sub(" ", text)))
    return "$" in text or bool(_WORD.search(without_names))


def needs_verifier(gold: str) -> bool:
    """Whether a bare gold answer is a formula and no value or option."""
    text = plain(gold)
    return is_formula(gold) and not (read_value(text) or _choice(text)[1])


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


# ---- accuracy ------------------------------------------------------------------------------------
# Reward plugin: 1 if the policy's answer equals the sample's known answer, else 0.

_BOXED = r"\boxed{"


class Config(PluginConfig):
    """Where the answer is in the completion, and how much time a comparison may take."""

    tag_required: bool = True
    """false: without an `<answer>` block, the content of the last \\boxed{} is the answer."""
    max_answer_chars: Annotated[int, Field(ge=1, le=10_000)] = 400
    """A longer answer is wrong and is not compared."""
    max_cpu_s: Annotated[int, Field(ge=1, le=3600)] = 3
    """CPU time for comparing two formulas, s; an answer that takes more is wrong, `undecided`."""


class UnreadableGoldError(ValueError):
    """The known answer is missing, or no answer can be compared with it."""


class Accuracy(Reward[Config]):
    """Compares the last `<answer>...</answer>` of the policy's words with the gold, which is
    `Sample.hidden['answer']`: multiple choice by letter or text, numbers with percent, units and
    thousands commas, dates, scores and codes as they are written, text regardless of case and
    punctuation, formulas by symbolic equality. A letter does not equal its text if only the
    question says which belong together."""

    needs = frozenset({"text", "answer"})
    reads_thoughts = False

    def __init__(self, config: Config, resources: Resources) -> None:
        """Starts the worker process that compares formulas, without waiting for it."""
        super().__init__(config, resources)
        self._maths = MathsProcess(config.max_cpu_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="accuracy")

    def close(self) -> None:
        """Ends the worker process after its current comparison."""
        self._thread.shutdown(cancel_futures=True)
        self._maths.close()

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        """1.0 or 0.0. Parts: `parsed`, there is an answer; `undecided`, comparing it took too long.
        No value (UNGRADED) if the gold cannot be read or the machine is too busy."""
        started = time.monotonic()
        answer = self._answer(reward_input.words)
        try:
            gold = read_gold(reward_input.sample.hidden)
            right, undecided = await self._compare(gold, answer)
        except UnreadableGoldError as error:
            # The gold is not quoted: failures are written into episode records.
            return RewardOutput(
                None, failure=f"gold: of sample {reward_input.sample.id!r}: {error}"
            )
        except TimeoutError as error:
            return RewardOutput(None, failure=f"timeout: {error}")
        parts = {"parsed": float(bool(answer)), "undecided": float(undecided)}
        return RewardOutput(float(right), parts, seconds=time.monotonic() - started)

    def _answer(self, text: str) -> str:
        """The policy's bare answer; '' if there is none, or if it is too long."""
        answer = last_block(text, "answer")
        if answer is None and not self.config.tag_required:
            answer = last_boxed(text)
        if answer is None or len(answer) > self.config.max_answer_chars:
            return ""
        return bare(answer)

    async def _compare(self, gold: str, answer: str) -> tuple[bool, bool]:
        """(equal, undecided). Raises UnreadableGoldError and TimeoutError."""
        if answer and is_same_text(gold, answer):
            return True, False
        if needs_verifier(gold) and await self._ask_maths(gold, None) != "readable":
            raise UnreadableGoldError("cannot be read as a formula")
        if not answer:
            return False, False
        same = compare(gold, answer)
        if same is not None:
            return same, False
        verdict = await self._ask_maths(gold, answer)
        return verdict == "equal", verdict == "too_costly"

    async def _ask_maths(self, gold: str, answer: str | None) -> str:
        latex = None if answer is None else as_latex(answer)
        compare = partial(self._maths.compare, as_latex(gold), latex)
        return await asyncio.get_running_loop().run_in_executor(self._thread, compare)


def read_gold(hidden: Mapping[str, Any]) -> str:
    """The bare known answer; `hidden` may give it within answer tags.

    Raises UnreadableGoldError.
    """
    gold = hidden.get("answer")
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        raise UnreadableGoldError(f"{type(gold).__name__} under 'answer'; expected text or number")
    text = str(gold)
    tagged = last_block(text, "answer")
    text = bare(text if tagged is None else tagged)
    if not text:
        raise UnreadableGoldError("empty")
    return text


def last_boxed(text: str) -> str | None:
    """The content of the last complete \\boxed{}."""
    _, found, rest = text.rpartition(_BOXED)
    return up_to_closing_brace(rest) if found else None


# ---- format --------------------------------------------------------------------------------------
# Reward plugin: 1 if the completion is `<think>...</think><answer>...</answer>`, else 0.


class Format(Reward):
    """Requires exactly the two blocks, in this order, neither of them empty."""

    needs = frozenset({"text"})

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        text, names = reward_input.text, ("think", "answer")
        if any(text.count(tag) != 1 for name in names for tag in (f"<{name}>", f"</{name}>")):
            return RewardOutput(0.0)
        blocks = r"\s*".join(rf"<{name}>(.*)</{name}>" for name in names)
        match = re.fullmatch(rf"\s*{blocks}\s*", text, re.DOTALL)
        return RewardOutput(float(match is not None and all(map(str.strip, match.groups()))))
