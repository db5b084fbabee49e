"""Mutated replies by the thousand: read, unreadable, or a failed question; never another end."""

from __future__ import annotations

import asyncio
import json
import random
import re
import string
import time
from typing import Any

import httpx
import pytest
from tiny_faulty_judge import (
    GOOD,
    Fault,
    FaultyJudge,
    page,
    pair_question,
    quick_config,
    read_pair,
    said,
)

from rl.judge.client import Answer, JudgeClient, JudgeRefused
from rl.judge.endpoint import resolve_api_base
from rl.judge.reply import UnreadableReplyError, chat_content, read_scores, served_models
from rl.judge.retry import RETRY_AFTER_CAP_S, retry_after_s

TIMEOUT_S = 0.5
ODD_JSON = [
    None, True, 0, -1, 10**300, 1.5, "", "abc", "\ud800", "\x00\x1b[2J", GOOD, [], {}, [[]], [None],
    {"0": 1}, {"message": None}, [{"message": {"content": 1}}], [{"type": "text", "text": GOOD}],
]  # fmt: skip
ODD_BYTES = [
    b"[" * 5000, b'{"a":' * 5000, b"9" * 5000, b"NaN", b"-Infinity", b"1e999", b"\xff\xfe", b"\x00",
    b"\xed\xa0\x80", b"\xef\xbb\xbf", b'"', b"\\ud800", b"\\u", b"\n", b"}", b"]", b"{", b",", b"",
]  # fmt: skip


def _mutated(rng: random.Random) -> bytes:
    """A reply in which something, at some depth, is something else."""
    marks = {"reasoning": "fine", "score": [8, 6.5]}
    words: Any = rng.choice([marks, {**marks, "score": rng.choice(ODD_JSON)}])
    content = _dented(json.dumps(words).encode(), rng).decode("utf-8", "replace")
    reply: Any = {"choices": [{"message": {"content": content}}], "data": [{"id": "tiny-judge"}]}
    parents = [reply, reply, reply["choices"], reply["choices"][0], reply["choices"][0]["message"]]
    if rng.random() < 0.5:
        parent = rng.choice(parents)
        key = 0 if isinstance(parent, list) else rng.choice(list(parent))
        parent[key] = rng.choice(ODD_JSON)
    return _dented(json.dumps(reply).encode(), rng)


def _dented(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice([0, 0, 1, 2, 5])):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice([0, 0, 1, 3, 20]))
        data = data[:start] + rng.choice([*ODD_BYTES, rng.randbytes(3)]) + data[end:]
    return data


@pytest.mark.parametrize("seed", range(4))
def test_any_reply_is_read_or_unreadable(seed: int) -> None:
    rng = random.Random(seed)
    ends = {"read": 0, "words only": 0, "unreadable": 0}
    started = time.monotonic()
    for _ in range(1500):
        body = _mutated(rng)
        names = served_models(body)
        assert names is None or all(isinstance(name, str) for name in names)
        try:
            words = chat_content(body)
            words.encode()
        except UnreadableReplyError as error:
            assert str(error).isprintable()
            ends["unreadable"] += 1
            continue
        try:
            scores = read_scores(words, 2, 0, 10)
            assert len(scores) == 2 and all(0 <= score <= 10 for score in scores)
            ends["read"] += 1
        except UnreadableReplyError as error:
            assert len(str(error)) < 200
            ends["words only"] += 1
    assert time.monotonic() - started < 30
    assert min(ends.values()) > 50, f"the mutations reach every end: {ends}"


def test_any_retry_after_is_a_pause_or_nothing() -> None:
    rng = random.Random(4)
    dates = ["Fri, 21 Nov 2025 12:00:30 GMT", "21 Nov 25 12:00 +0100", "7", "0.5", "1e400", "-3"]
    odd = [*"0123456789:,+-. eE_GMT", "\u0663", "9" * 20, "inf", "nan", "\x00", "\ud800"]
    seen = set()
    for _ in range(5000):
        text = list(rng.choice(dates))
        for _ in range(rng.randrange(6)):
            text[rng.randrange(len(text))] = rng.choice(odd)
        pause_s = retry_after_s("".join(text))
        assert pause_s is None or 0 <= pause_s <= RETRY_AFTER_CAP_S
        seen.add(pause_s is None)
    assert seen == {True, False}


def _any_fault(rng: random.Random) -> Fault:
    """A page whose status, headers, framing, body and end are drawn."""
    status = rng.choice(["200 OK"] * 6 + ["429 Slow", "500 Odd", "503 \x1b[2J", "099 x", "999 x"])
    headers = [
        f"{name}: {rng.choice(values)}"
        for name, values in (
            ("Content-Encoding", ["identity", "gzip", "", "\xff"]),
            ("Content-Type", ["text/html; charset=base64", "a; charset=undefined", "\x00"]),
            ("Retry-After", ["0", "1e400", "-5", "nan", "\xd9\xa3", "Fri, 21 Nov 0001"]),
            ("Location", ["http://xn--a/", "http://[", "//", "\xff"]),
            ("Set-Cookie", ["a=b; expires=Fri, 99 Foo", "=" * 999]),
            ("Transfer-Encoding", ["chunked", "gzip", "chunked, chunked"]),
        )
        if rng.random() < 0.25
    ]
    fault = page(_mutated(rng), *headers, status=status, length=rng.choice([None, None, 5, 10**9]))
    assert fault.raw is not None
    data = b"".join(fault.raw())
    if rng.random() < 0.3:
        data = _dented(data, rng)
    cut = rng.choice([len(data), len(data), rng.randrange(len(data))])
    return said(data[:cut])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_any_answer_over_a_socket_leaves_the_next_question_its_grade(seed: int) -> None:
    """And when the judge is well again, so is the client."""
    rng = random.Random(100 + seed)

    async def run(judge: FaultyJudge) -> list[Answer[Any]]:
        # One connection: if any answer kept it, the next question would find none.
        config = quick_config(
            timeout_s=TIMEOUT_S, max_attempts=2, max_outage_s=1.0, max_concurrency=1
        )
        client = JudgeClient(config, judge.api_base)
        answers = []
        for number in range(25):
            judge.faults = [_any_fault(rng), _any_fault(rng)]
            try:
                answers.append(await client.ask(pair_question(f"q{number}"), read_pair))
            except JudgeRefused as error:
                # Only a status says so: a dent in '200' can spell one.
                assert re.search(r"-> HTTP (?!200|429|5)\d{3} ", str(error))
        judge.faults = []
        last = await client.ask(pair_question("the last"), read_pair)
        assert last.value == (8.0, 6.5)
        await client.aclose()
        return answers

    with FaultyJudge() as judge:
        answers = asyncio.run(run(judge))
    words = {answer.failure.partition(":")[0] for answer in answers if answer.failure}
    known = {"timeout", "transport", "unreadable", "refused", "outage"}
    assert all(word in known or re.fullmatch(r"http_\d{3}", word) for word in words), words
    for answer in answers:
        assert (answer.value is None) == (answer.failure is not None)
        assert (answer.failure or "").isprintable() and answer.seconds < 6


def test_any_address_is_askable_or_a_mistake_that_names_the_key() -> None:
    rng = random.Random(11)
    odd = [
        *string.printable,
        "\u0663",
        "\u2100",
        "\u200d",
        "\ud800",
        "\x00",
        "xn--",
        "[",
        "::1",
        "..",
        "%",
    ]
    good = [
        "http://judge:4877/v1",
        "https://b\u00fccher.example/api",
        "10.0.0.7:80",
        "http://[::1]:1",
    ]
    num_askable = 0
    for _ in range(4000):
        text = list(rng.choice(good))
        for _ in range(rng.randrange(4)):
            text[rng.randrange(len(text))] = rng.choice(odd)
        try:
            base = resolve_api_base("".join(text))
        except ValueError as error:
            assert type(error) is ValueError and "judge.api_base" in str(error)
            str(error).encode()
        else:
            request = httpx.Request("GET", base + "/models")
            assert request.url.host and request.url.scheme in ("http", "https")
            request.url.raw_host.decode("ascii").encode("idna")  # as getaddrinfo does
            num_askable += 1
    assert 500 < num_askable < 3500
