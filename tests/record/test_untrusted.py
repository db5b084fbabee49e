"""Text from other machines, made safe to print and to write."""

from __future__ import annotations

import pytest

from rl.printing import excerpt, without_lone_surrogates


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain, größer, 好", "plain, größer, 好"),
        ("two\r\nlines\u2028and\x85more\ttabs", "two lines and more tabs"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("user\u202etxt.exe\u2066", "user\\u202etxt.exe\\u2066"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("half \ud83d", "half \\ud83d"),
        ("", ""),
    ],
)
def test_untrusted_text_becomes_one_printable_line(text: str, line: str) -> None:
    assert excerpt(text, 100) == line


def test_overlong_text_is_cut_and_marked() -> None:
    assert excerpt("a" * 10, 10) == "a" * 10
    assert excerpt("a" * 11, 10) == "a" * 10 + "..."
    assert excerpt("\x00" * 10, 10) == "\\x00\\x00\\x" + "..."
    assert excerpt(" " * 1000 + "a", 10) == "..."


def test_only_lone_surrogates_are_replaced() -> None:
    assert without_lone_surrogates("\ufeffa\ud800b\udc00\U0001f600\ud83d") == (
        "\ufeffa\ufffdb\ufffd\U0001f600\ufffd"
    )
