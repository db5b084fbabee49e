"""Rewards of a text answer: is it right, and is it in its tags."""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from rl.api.plugin import PluginConfig, Resources
from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput
from rl.rewards.maths import MathsProcess

# ---- tags ----------------------------------------------------------------------------------------
# Finds `<answer>...</answer>` blocks in a completion.


def last_answer(text: str) -> str | None:
    """The content of the last complete answer block; None if there is none."""
    before_end, _, _ = text.rpartition("</answer>")
    _, start, answer = before_end.rpartition("<answer>")
    return answer if start else None


# ---- answers -------------------------------------------------------------------------------------
# Compares answers by their text, as far as that is possible without a formula parser.

MAX_NUMBER_CHARS = 60
RELATIVE_TOLERANCE = Fraction(1, 10**6)
"""0.333333 equals 1/3. Whole numbers are compared exactly."""

_LEAD_IN = re.compile(
    r"(?:so |thus |therefore )?,?\s*(?:the |my )?(?:correct |final )?(?:answer|option|choice)"
    r"(?: is)?\s*:?\s+(?=\S)",
    re.IGNORECASE,
)
_BOXED = r"\boxed{"
_PLAIN = (
    (r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}", r" \1 "),
    (r"\\left|\\right", ""),
    (r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree\b|\bdegrees?\b|(?<=\d)\s+°)", "°"),
    (r"\\%|\s*\b(?:percent|pct)\b", "%"),
    (r"\\([$#])", r"\1"),
    (r"([+-]?)\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}", r"\1\2/\3"),
    (r"\\[,;:! ]|~|\\q?quad|\s+", " "),
    (r"(?<=\d)\s*([-:])\s*(?=\d)", r"\1"),
    (r"(?<=[A-Za-z])_\{?(\d+)\}?", r"\1"),
)
_CHARACTERS = str.maketrans("\u2010\u2011\u2012\u2013\u2014\u2212₀₁₂₃₄₅₆₇₈₉", "------0123456789")
_CHOICE = re.compile(r"[(\[]?(?:([A-Ja-j])[)\].:]*|([A-J])[)\].:]\s*(\S.*))", re.DOTALL)
_NUMBER = re.compile(
    r"""(?P<sign>-?)[$€£¥]?(?:(?P<whole>\d+)\s(?=\d+/))?
    (?P<number>\d+\s?/\s?\d+
      | (?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)
    \s?(?P<unit>
        [°%]
      | (?:[ckm]m|[km]g|ml|lb|ft|in|hz|[ck]?m/s|km/h|(?<=\s)(?-i:[mgshlLNKJWVA]))(?:\^?[23²³])?
      | (?!.*(?:hundred|thousand|[mb]illion|dozen|half|quarter|squared|cubed|and|plus|minus|not))
        (?<=\s)[a-z]{3,}(?:\s[a-z]{3,}){0,2}(?:\^[23])?
    )?""",
    re.VERBOSE | re.IGNORECASE,
)
_LITERAL = re.compile(
    r"(?=.*(?:\d[-:]|[./]\d+[./])\d)[\d.,:/ -]+(?: [A-Za-z.]+)?|(?=.*\d)(?=.*[A-Z])[A-Za-z\d-]+"
    r"|\d+(?:st|nd|rd|th|s|k|am|pm)|(?:[A-Za-z]{1,3}|\d+)[+#*]+|[A-Za-z]{1,3}-"
)
"""An answer to compare literally, although a parser would read a formula: 3-1, 10:30, 1.2.3,
2021-05-06, B2, F-16, 5th, C#, A+; not 2x and x-1."""
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{3,}")
_AND = re.compile(r",?\s*\band\b\s*")
_FUNCTIONS = "arcsin|arccos|arctan|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|min|max|det|gcd|lcm|pi"
_FUNCTION = re.compile(rf"(?<![\\A-Za-z])({_FUNCTIONS})(?=[\W\d_]|$)")
_OPERATOR = re.compile(r"[\d\\=<>+*/^|≤≥≠√π±∞-]")
_PUNCTUATION = re.compile(r"[^\w\s](?!\d)")
_LATEX = (
    (_AND.pattern, ", "),
    (_FUNCTION.pattern, r"\\\1 "),
    (r"\*\*", "^"),
    ("²", "^{2}"),
    ("³", "^{3}"),
    (r"(?<=\d)e([+-]?\d+)", r"*10^\1"),
    (r"(?<=\d)\s*(?:x|\u00d7)\s*(?=10\s*\^)", "*"),
    (r"\^\s*(-\d+)", r"^{\1}"),
    (r"√\s*(\d+|[A-Za-z])|\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1\2}"),
    ("°", r"^{\\circ}"),
    ("·", r"\\cdot "),
    ("∞", r"\\infty "),
)
"""Rewrites what the verifier does not read."""


def bare(text: str) -> str:
    """The answer without wrappers: dollars, a box, stars, 'the answer is', a final full stop."""
    text = re.sub(r"\\[()\[\]]", "", " ".join(text.split()))
    if text.count("$") % 2 == 0 and r"\$" not in text:
        text = text.replace("$", "")  # $ pairs mark formulas; a single $ is money
    text = _LEAD_IN.sub("", text.strip(' *`"'), 1)
    boxed = last_boxed(text)
    return (text if boxed is None else boxed).lstrip(' *`"#').rstrip(' .。*`"')


def last_boxed(text: str) -> str | None:
    """The content of the last complete \\boxed{}."""
    _, found, rest = text.rpartition(_BOXED)
    depth = 1
    for brace in re.finditer(r"[{}]", rest if found else ""):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return rest[: brace.start()]
    return None


def plain(text: str) -> str:
    """A bare answer without LaTeX markup for text, spaces, signs and fractions of integers."""
    text = text.translate(_CHARACTERS)
    for pattern, replacement in _PLAIN:
        text = re.sub(pattern, replacement, text)
    return text.strip()


def compare(gold: str, answer: str) -> bool | None:
    """Whether two bare answers are equal; None if only the mathematical verifier can tell."""
    plain_gold, plain_answer = plain(gold), plain(answer)
    if is_same_text(plain_gold, plain_answer):
        return True
    by_choice = _compare_choices(plain_gold, plain_answer)
    if by_choice is not None:
        return by_choice
    number, answered = read_number(plain_gold), read_number(plain_answer)
    if number and answered:
        return same_quantity(*number, *answered)
    if _LITERAL.fullmatch(plain_gold) or _LITERAL.fullmatch(plain_answer):
        return False
    if _OPERATOR.search(gold) and not (_has_words(plain_gold) or _has_words(plain_answer)):
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


def read_number(text: str) -> tuple[Fraction, str] | None:
    """(number, its unit or '') of a plain answer such as '1,200.5 cm', '50%', '$3' or '1 1/2'; None
    for others, such as '5x'. A unit of a single letter or of words needs a space before it."""
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_NUMBER_CHARS else None
    if match is None:
        return None
    try:
        number = Fraction(re.sub(r"[\s,]", "", match["number"])) + Fraction(match["whole"] or 0)
    except ZeroDivisionError:
        return None
    unit = re.sub(r"(?<=\w\w)s$|\^", "", (match["unit"] or "").casefold())
    return (-number if match["sign"] else number), unicodedata.normalize("NFKC", unit)


def same_quantity(gold: Fraction, unit: str, answer: Fraction, answer_unit: str) -> bool:
    """Whether number and unit are the same. A unit that only one of them has is ignored, but a
    percentage equals a plain gold only as a fraction of 1; 50 % may also be written 50 or 0.5."""
    if unit and answer_unit:
        return unit == answer_unit and _same_number(gold, answer)
    if answer_unit == "%":
        return _same_number(gold, answer / 100)
    return _same_number(gold, answer) or (unit == "%" and _same_number(gold, answer * 100))


def _same_number(gold: Fraction, answer: Fraction) -> bool:
    if gold.denominator == answer.denominator == 1:
        return gold == answer
    return abs(gold - answer) <= RELATIVE_TOLERANCE * max(abs(gold), abs(answer))


def _has_words(text: str) -> bool:
    """Words are not a formula: a parser reads `blue` as the product b l u e, equal to `lube`."""
    without_names = _FUNCTION.sub(" ", _COMMAND.sub(" ", _AND.sub(" ", text)))
    return "$" in text or bool(_WORD.search(without_names))


def as_latex(text: str) -> str:
    """A bare answer in the LaTeX notation that the verifier reads."""
    for pattern, latex in _LATEX:
        text = re.sub(pattern, latex, text)
    return text


def _normalized(text: str) -> str:
    """Normalize case, spaces and Unicode form; drop punctuation, except before a digit."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(_PUNCTUATION.sub(" ", text).split())


# ---- accuracy ------------------------------------------------------------------------------------
# Reward plugin: 1 if the policy's answer equals the sample's known answer, else 0.


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
    """1 if the policy's answer equals the known answer, `Sample.hidden['answer']`, else 0. The
    answer is in the last `<answer>...</answer>` of the policy's words.

    Compares multiple choice by letter or text, numbers with percent, units and thousands commas,
    codes, scores and dates as they are written, other text regardless of case and punctuation,
    formulas by symbolic equality. A letter does not equal its text if only the question says which
    belong together. Parts, each 0 or 1: `parsed`, there is an answer; `undecided`, comparing it
    took too long."""

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
        """No value (UNGRADED) if the gold cannot be read or the machine is too busy."""
        answer = self._answer(reward_input.words)
        try:
            gold = read_gold(reward_input.sample.hidden)
            verdict = await self._compare(gold, answer)
        except UnreadableGoldError as error:
            # The gold is not quoted: failures are written into episode records.
            return RewardOutput(
                None, failure=f"gold: of sample {reward_input.sample.id!r}: {error}"
            )
        except TimeoutError as error:
            return RewardOutput(None, failure=f"timeout: {error}")
        parts = {"parsed": float(bool(answer)), "undecided": float(verdict == "too_costly")}
        return RewardOutput(float(verdict == "equal"), parts)

    def _answer(self, text: str) -> str:
        """The policy's bare answer; '' if there is none, or if it is too long."""
        answer = last_answer(text)
        if answer is None and not self.config.tag_required:
            answer = last_boxed(text)
        if answer is None or len(answer) > self.config.max_answer_chars:
            return ""
        return bare(answer)

    async def _compare(self, gold: str, answer: str) -> str:
        """'equal', 'different' or 'too_costly'. Raises UnreadableGoldError, and what
        `MathsProcess` raises."""
        same = compare(gold, answer) if answer else False
        if same is not None:
            return "equal" if same else "different"
        ask = partial(self._maths.compare, as_latex(gold), as_latex(answer))
        verdict = await asyncio.get_running_loop().run_in_executor(self._thread, ask)
        if verdict == "unreadable_gold":
            raise UnreadableGoldError("cannot be read as a formula")
        return verdict


def read_gold(hidden: Mapping[str, Any]) -> str:
    """The bare known answer; `hidden` may give it within answer tags.

    Raises UnreadableGoldError.
    """
    gold = hidden.get("answer")
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        raise UnreadableGoldError(f"{type(gold).__name__} under 'answer'; expected text or number")
    text = str(gold)
    tagged = last_answer(text)
    text = bare(text if tagged is None else tagged)
    if not text:
        raise UnreadableGoldError("empty")
    return text


# ---- format --------------------------------------------------------------------------------------
# Reward plugin: 1 if the completion is `<think>...</think><answer>...</answer>`, else 0.


class Format(Reward):
    """1 if the completion is `<think>...</think><answer>...</answer>`, else 0. Both blocks have to
    be there once, in this order, neither of them empty, with nothing but white space around them.
    """

    needs = frozenset({"text"})

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        text, names = reward_input.text, ("think", "answer")
        if any(text.count(tag) != 1 for name in names for tag in (f"<{name}>", f"</{name}>")):
            return RewardOutput(0.0)
        blocks = r"\s*".join(rf"<{name}>(.*)</{name}>" for name in names)
        match = re.fullmatch(rf"\s*{blocks}\s*", text, re.DOTALL)
        return RewardOutput(float(match is not None and all(map(str.strip, match.groups()))))
