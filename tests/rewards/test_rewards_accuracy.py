"""The reward `accuracy` recognizes right answers, and hostile answers do no harm."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_rewards import make

from rl.api.types import RewardInput, RewardOutput, Sample
from rl.rewards import accuracy


def pairs(text: str) -> list[tuple[str, str]]:
    """Of lines 'right answer | answer of a completion'."""
    split = [line.partition(" | ") for line in text.splitlines()]
    return [(gold, answer) for gold, bar, answer in split if bar]


RIGHT: list[tuple[Any, str]] = [
    *pairs(r"""
# numbers
5 | 5
5 | 5.0
1234 | 1,234
0.5 | 1/2
1/3 | 0.333333
0.333333 | 1/3
1.5 | 1 1/2
2500 | 2.5e3
50% | 0.5
0.5 | 50\%
50% | 50
# units
5 cm | 5
5 cm | 5cm
25 cm^2 | 25 cm²
5 | 5 cm
90^{\circ} | 90 degrees
90 | 90°
$3.50 | 3.5 dollars
7 | 7 apples
# multiple choice
B | (B)
B | B.
(B) | b
B | B) red
B) red | B
B) red | Red
red | (B) red
B | The answer is B
B | **B**
# text
blue | Blue.
ice cream | ice-cream
Yes | yes
# formulas
\frac{1}{2} | \dfrac12
2\sqrt{2} | \sqrt{8}
2\sqrt{2} | 2√2
x^2-1 | (x-1)(x+1)
2x+1 | 1 + 2*x
x**2 | x²
\sin(x)^2 | 1-cos(x)^2
y=2x+1 | 2x - y + 1 = 0
x=5 | 5
5 | x = 5
x>3 | 3<x
\{1,2\} | 2, 1
\pi/4 | pi/4
$x=3$, $y=5$ | x = 3 and y = 5
$1$ and $2$ | 2, 1
[1,2) | $[1, 2)$
\log_2 8 | 3
10! | 3628800
\frac{\sqrt{3}}{2} | sqrt(3)/2
# wrappings
$5$ | 5
\boxed{\frac{3}{4}} | 0.75
5 | \boxed{5}
\text{blue} | blue
# what used to be read as formulas
A+ | A+
C++ | C++
O+ | O+
O- | O-
AB+ | ab+
F\# | F#
# dates
2021-05-06 | 2021-05-06
May 6, 2021 | may 6 2021.
1990s | 1990s
# times, scores, ranges, telephone numbers, versions
3-1 | 3 - 1
555-1234 | 555-1234
1.2.3 | 1.2.3
192.168.0.1 | 192.168.0.1
1-3, 5-7 | 1-3, 5-7
# codes
B2 | b2
2B | 2B
H2O | H_2O
Fe2O3 | Fe_2O_3
#5 | 5
H2O | $\mathrm{H_2O}$
H2O | H₂O
C6H12O6 | C6H12O6
5th | 5th
AC/DC | AC/DC
N/A | N/A
# per cent, only as its fraction
0.5 | 50%
50% | 50 percent
12.5% | 1/8
1 | 100%
0 | 0%
# tiny and large numbers
10^-30 | 10^{-30}
1e-30 | 10^-30
3 \times 10^{-7} | 3e-7
6.02 \times 10^{23} | 6.02*10^23
2^{-100} | 1/2^{100}
0 | \sqrt{2}-\sqrt{2}
# formulas that look like codes
2x | 2x
2x | x*2
x-1 | -1+x
n-1 | n - 1
2\pi | 2*pi
10² | 100
3/4 | 0.75
2x+1 | 1+2x
1,234 | 1234
a^2-b^2 | (a-b)(a+b)
# text
Mount Everest | mount everest
New York | new-york
T-Rex | t rex
IV | iv
"""),
    ("5", " 5. "),
    ("-3", "\u22123"),
    ("<think>because</think>\n<answer> $5$ </answer>", "5"),
    (5, "5"),
    (0.25, "1/4"),
    ("1999-2003", "1999\u20132003"),
    ("5-10", "5\u201310"),
]
WRONG: list[tuple[Any, str]] = [
    *pairs(r"""
5 | 6
5 | -5
5 | 5x
5 | 5 squared
5 | 5 million
5 | 5 or 6
5 | 5, 6
1000000 | 1000001
1.5 | 15
5 cm | 5 m
5 cm | 5 cm^2
3 apples | 3 pears
50% | 0.05
50% | 0.5%
B | C
B | A or B
B) red | B) blue
B | a blue one
blue | lube
route 66 | outer 66
no | on
blue | not blue
two | one
x+1 | x-1
x+1 | x+1 where x is large
(1,2) | (2,1)
\frac{1}{2} | \frac{1}{3}
\frac{1}{2} | \frac{1}{
2\sqrt{2} | $1$ or $2\sqrt{2}$
2\sqrt{2} | $1$, $2\sqrt{2}$
2\sqrt{2} | $1$ and $2\sqrt{2}$
[1,2) | [1,2]
# what used to be read as formulas
2021-05-06 | 2010
3-1 | 2
B2 | 2B
H2O | HO2
C# | C
5 | 5%
10^-30 | 10^-31
A+ | A
A+ | A-
C++ | C
O+ | O-
F# | F
# dates
2021-05-06 | 2021-06-05
2021-05-06 | 06.05.2021
05/06/2021 | 06/05/2021
May 6, 2021 | May 7, 2021
May 6, 2021 | 2021
7/4/1776 | July 4, 1776
1999-2003 | -4
1990s | 1990
# times, scores, ranges, telephone numbers, versions
10:30 am | 10:30 pm
10:30 | 20
10:30 | 10:45
3-1 | 1-3
2:1 | 2
5-10 | -5
555-0123 | 555-123
5-10 cm | 5-10 m
555-1234 | -679
1.2.3 | 1.23
192.168.0.1 | 192.168.0.2
1-3, 5-7 | -2
50-50 | 0
# codes
B2 | B3
2B | B2
CO2 | C2O
C6H12O6 | H12C6O6
F-16 | F-15
5G | G5
3D | D3
5th | 5
MP3 | 3MP
R2D2 | D2R2
5+ | 5
80s | 80
# per cent, only as its fraction
5 | 5 percent
5% | 0.5
100 | 100%
# tiny and large numbers
1e-30 | 1e-31
3 \times 10^{-7} | 4 \times 10^{-7}
6.02 x 10^23 | 6.03 x 10^23
2^{-100} | 2^{-101}
e^{-80} | e^{-81}
\frac{1}{10^{30}} | \frac{1}{10^{31}}
0 | 10^{-9}
10^-9 | 0
0.0000001 | 0.0000002
# formulas that look like codes
x_1 | x_2
10² | 102
# text
blue | green
"""),
    ("5", ""),
]


def worker_of(reward: accuracy.Accuracy) -> psutil.Process:
    """The process that compares the reward's formulas; `_compare` starts it again if it has ended.
    (`grade` would return a cached result without starting it.)"""
    reward._maths._compare("3", "2\\sqrt{2}x")
    return psutil.Process(reward._maths._process.pid)


@pytest.fixture(scope="module")
def reward() -> Iterator[accuracy.Accuracy]:
    with closing(make(accuracy.Accuracy, accuracy.Config(max_cpu_s=1))) as reward:
        yield reward


def grade(reward: accuracy.Accuracy, text: str, gold: Any) -> RewardOutput:
    return asyncio.run(
        reward.grade(RewardInput(Sample("a", "?", hidden={"answer": gold}), text, None))
    )


def answered(answer: str) -> str:
    return f"<think>so it is</think><answer>{answer}</answer>"


@pytest.mark.parametrize(("gold", "answer"), RIGHT, ids=str)
def test_a_right_answer_scores_1(reward: accuracy.Accuracy, gold: Any, answer: str) -> None:
    result = grade(reward, answered(answer), gold)
    assert result.value == 1.0 and result.parts == {"parsed": 1, "undecided": 0}


@pytest.mark.parametrize(("gold", "answer"), WRONG, ids=str)
def test_wrong(reward: accuracy.Accuracy, gold: Any, answer: str) -> None:
    assert grade(reward, answered(answer), gold).value == 0.0


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("<answer>4</answer> no, <answer>5</answer>", True),
        ("<answer>5</answer> and <answer>4", True),
        ("<answer>5", False),
        ("the answer is 5", False),
        ("\\boxed{5}", False),
        ("", False),
    ],
)
def test_the_last_complete_answer_block_counts(
    reward: accuracy.Accuracy, text: str, is_right: bool
) -> None:
    result = grade(reward, text, "5")
    assert result.value == float(is_right) and result.parts["parsed"] == float(is_right)


@pytest.mark.parametrize(("words", "right"), [("<answer>7</answer>", 1.0), ("who knows?", 0.0)])
def test_an_answer_inside_the_thought_does_not_count(
    reward: accuracy.Accuracy, words: str, right: float
) -> None:
    thought = "<answer>7</answer>, or not?</think>"
    thinking = RewardInput(Sample("a", "?", hidden={"answer": "7"}), thought + words, None, thought)
    assert asyncio.run(reward.grade(thinking)).value == right


def test_a_box_is_an_answer_if_the_tag_is_not_required() -> None:
    with closing(make(accuracy.Accuracy, accuracy.Config(tag_required=False))) as reward:
        assert grade(reward, "first \\boxed{1}, then \\boxed{\\frac{1}{2}}", "0.5").value == 1
        assert grade(reward, "\\boxed{4} <answer>5</answer>", "5").value == 1
        assert grade(reward, "\\boxed{5", "5").parts["parsed"] == 0


@pytest.mark.parametrize(
    "gold", ["", " $ $ ", "<answer></answer>", None, ["5"], True, "\\frac{1}{", "3 + + )"]
)
def test_an_unreadable_gold_answer_is_ungraded(reward: accuracy.Accuracy, gold: Any) -> None:
    result = grade(reward, answered("5"), gold)
    failure = result.failure or ""
    assert result.value is None and failure.startswith("gold: of sample 'a': ")
    assert not gold or str(gold) not in failure


HOSTILE = [
    "9" * 390,
    "9" * 100_000,
    "2^{" * 120,
    "(" * 390,
    "__import__('os').system('touch hacked')",
    "\\input{/etc/passwd}",
    "\\text{__import__('os').system('touch hacked')}+1",
    "nan",
    "\\infty",
    "\x00\n\r $",
]
COSTLY = [
    "10000000!",
    "((((9!)!)!)!)!",
    "9^{9^{9^{9}}}",
    "\\sum_{i=1}^{10000000000} i^i",
    "x^{99999999}-(x-1)^{99999999}",
    "(1+x)^{3000}(1-x)^{3000}",
    "\\int_0^1 e^{e^{e^{x}}} \\sin(x^x) dx",
]
SLOW = ("(" * 390, *COSTLY[1:])


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(answer, marks=pytest.mark.slow if answer in SLOW else ())
        for answer in (*HOSTILE, *COSTLY)
    ],
    ids=lambda answer: answer[:20],
)
def test_a_hostile_answer_is_wrong_and_does_no_harm(
    reward: accuracy.Accuracy, answer: str, tmp_path: Path
) -> None:
    started = time.monotonic()
    result = grade(reward, answered(answer), "2\\sqrt{2}x")
    assert result.value == 0.0 and (result.parts["undecided"] or answer not in COSTLY)
    assert time.monotonic() - started < 60, "the time is limited, also on a busy machine"
    assert grade(reward, answered("x\\sqrt{8}"), "2\\sqrt{2}x").value == 1.0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("answer", ["A. " * 3000, "A" + " " * 9000 + "x"], ids=["options", "gap"])
def test_a_long_answer_is_graded_in_linear_time(answer: str) -> None:
    with closing(make(accuracy.Accuracy, accuracy.Config(max_answer_chars=10_000))) as reward:
        started = time.process_time()
        assert grade(reward, answered(answer), "blue").value == 0.0
        assert time.process_time() - started < 1


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_meant_for_the_run_does_not_end_the_worker(
    reward: accuracy.Accuracy, stop: signal.Signals
) -> None:
    worker = worker_of(reward)
    worker.send_signal(stop)
    assert grade(reward, answered(f"x\\sqrt{{8}} - {stop} + {stop}"), "2\\sqrt{2}x").value == 1.0
    assert worker_of(reward) == worker


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_its_question_is_not_graded(
    reward: accuracy.Accuracy,
) -> None:
    worker = worker_of(reward)
    worker.kill()
    while worker.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    after_idle_death = grade(reward, answered("x\\sqrt{8} + 0"), "2\\sqrt{2}x")
    assert after_idle_death.value == 1.0 and after_idle_death.parts["undecided"] == 0
    threading.Timer(0.3, worker_of(reward).kill).start()
    with pytest.raises(RuntimeError, match="killed"):
        grade(reward, answered("(3+x)^{3000}(1-x)^{3000}"), "2\\sqrt{2}x")
    assert grade(reward, answered("0 + x\\sqrt{8}"), "2\\sqrt{2}x").value == 1.0
