"""Reading untrusted replies: exactly the requested JSON, or an error with the reason."""

from __future__ import annotations

import pytest

from rl.judge.reply import (
    UnreadableReplyError,
    fields_schema,
    read_fields,
    read_scores,
    scores_of_ten,
    scores_schema,
)

READABLE = {
    "bare": '{"score": [8, 7]}',
    "decimals": '{"score": [8.0, 7.0], "reasoning": "ok"}',
    "fenced": '```json\n{"score": [8, 7]}\n```',
    "after prose": 'Let me see.\n\nThe sky changed.\n{"reasoning": "x", "score": [8, 7]}\nDone.',
    "braces in the reasoning": '{"reasoning": "a {brace} and a \\"quote\\"", "score": [8, 7]}',
    "raw newline in the reasoning": '{"reasoning": "one\ntwo", "score": [8, 7]}',
    "unknown keys": '{"confidence": "high", "score": [8, 7]}',
    "in a line of prose": 'My answer [1], after all: {"score": [8, 7]} // done',
    "after a thought": '<think>{"score": [1, 1]} no.</think>{"score": [8, 7]}',
    "after two": '<think>a</think> <Thinking>{</Thinking>\n{"score": [8, 7]}',
    "after Kimi-VL's": '\u25c1think\u25b7{"score": [1, 1]}\u25c1/think\u25b7{"score": [8, 7]}',
    "after Magistral's": '[THINK]no {[/THINK]{"score": [8, 7]}',
    "after Seed's": '<seed:think>{"score": [1, 1]}</seed:think>{"score": [8, 7]}',
    "a heading": '[Reasoning] It is red. {"score": [8, 7]}',
    "a tag in the reasoning": '{"reasoning": "it shows <think> and </think>", "score": [8, 7]}',
    "exponent": '{"score": [8e0, 70E-1]}',
}


@pytest.mark.parametrize("text", READABLE.values(), ids=READABLE)
def test_the_scores_of_a_readable_reply(text: str) -> None:
    assert read_scores(text, 2, 0, 10) == (8.0, 7.0)


def test_both_ends_of_the_range_are_allowed() -> None:
    assert read_scores('{"score": [0, 10]}', 2, 0, 10) == (0.0, 10.0)


UNREADABLE = {
    "empty": ("", "no JSON object"),
    "prose": ("I would say 8 and 7.", "no JSON object"),
    "a bare list": ("[8, 7]", "no JSON object"),
    "truncated": ('{"reasoning": "the sky is', "broken JSON"),
    "truncated after the score": ('{"score": [8, 7], "reasoning": "the', "broken JSON"),
    "whole object inside a broken one": ('{"a": {"score": [8, 7]}', "broken JSON"),
    "unquoted keys": ("{score: [8, 7]}", "broken JSON"),
    "unescaped quotes": ('{"reasoning": "the "sky" is", "score": [8, 7]}', "broken JSON"),
    "two objects": ('{"score": [8, 7]} {"score": [8, 7]}', "more than one"),
    "an example before the object": ('As {"score": [..]}: {"score": [8, 7]}', "broken JSON"),
    "an object in a list": ('[{"score": [8, 7]}]', "not asked for"),
    "one brace too many": ('{"score": [8, 7]}}', "not asked for"),
    "a comment": ('// {"score": [8, 7]}', "not asked for"),
    "a comment of another kind": ('/* {"score": [8, 7]} */', "not asked for"),
    "no score": ('{"scores": [8, 7]}', "no list"),
    "a single number": ('{"score": 8}', "no list"),
    "numbers in a text": ('{"score": "8, 7"}', "no list"),
    "one too few": ('{"score": [8]}', "1 numbers"),
    "one too many": ('{"score": [8, 7, 6]}', "3 numbers"),
    "none": ('{"score": []}', "0 numbers"),
    "strings": ('{"score": ["8", "7"]}', "str under"),
    "true": ('{"score": [true, 7]}', "bool under"),
    "null": ('{"score": [null, 7]}', "NoneType under"),
    "nested": ('{"score": [[8], [7]]}', "list under"),
    "NaN": ('{"score": [NaN, 7]}', "NaN is not a number"),
    "Infinity": ('{"score": [Infinity, 7]}', "Infinity is not a number"),
    "overflow to infinity": ('{"score": [1e999, 7]}', "outside 0..10"),
    "too high": ('{"score": [99, 100]}', "outside 0..10"),
    "negative": ('{"score": [-1, 7]}', "outside 0..10"),
    "score twice": ('{"score": [8, 7], "score": [1, 1]}', "key twice"),
    "an integer of 5000 digits": ('{"score": [' + "1" * 5000 + ", 7]}", "broken JSON"),
    "nested beyond the stack": ('{"a":' * 20_000, "broken JSON"),
    "in a thought that does not end": ('<think>{"score": [8, 7]}', "does not end"),
    "in a thought that ends otherwise": ('<think>{"score": [8, 7]}</thinking>', "does not end"),
    "in Kimi-VL's that does not end": ('\u25c1think\u25b7{"score": [8, 7]}', "does not end"),
    "in Magistral's that does not end": ('[THINK]{"score": [8, 7]}', "does not end"),
    "only in a thought": ('<think>{"score": [8, 7]}</think> Fine.', "no JSON object"),
    "a second thought that does not end": ('<think>a</think><think>{"score": [8, 7]}', "not end"),
    "endless": ('{"score": [8, 7]}' + " " * 100_000, "characters long"),
}


@pytest.mark.parametrize(("text", "reason"), UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_reply_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(UnreadableReplyError, match=reason):
        read_scores(text, 2, 0, 10)


def test_named_numbers_come_in_the_requested_order() -> None:
    text = '{"reasoning": "x", "quality": 8, "alignment": 0.25}'
    assert read_fields(text, {"alignment": (0, 1), "quality": (0, 10)}) == (0.25, 8.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"alignment": 0.5}', "nothing under quality"),
        ('{"alignment": 7, "quality": 0.5}', '"alignment" outside 0..1'),
        ('{"alignment": "0.5", "quality": 0.5}', "str under"),
        ('{"alignment": 0.5, "quality": NaN}', "NaN"),
    ],
)
def test_unreadable_named_numbers_are_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(UnreadableReplyError, match=reason):
        read_fields(text, {"alignment": (0, 1), "quality": (0, 1)})


@pytest.mark.parametrize(
    ("schema", "parsed", "of_ten"),
    [
        (scores_schema(2, 10), (0.8, 6.0), [0.8, 6.0]),
        (scores_schema(2, 25), (0.8, 6.0), []),
        (fields_schema({"score": (0, 10)}), (0.8,), [0.8]),
        (fields_schema({"score": (0, 1)}), (0.8,), []),
        (fields_schema({"score": (0, 10), "identity": (0, 5)}), (0.8, 4.0), []),
        (scores_schema(2, 10), None, []),
        (scores_schema(2, 10), 0.8, []),
        ({}, (0.8,), []),
    ],
)
def test_scores_on_a_scale_of_ten_are_found_by_the_schema(schema, parsed, of_ten) -> None:
    assert scores_of_ten(schema, parsed) == of_ten
