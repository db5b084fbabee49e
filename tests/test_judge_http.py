"""Whatever bytes a judge sends, they cost one try of one question: over sockets, and in bulk."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import random
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_faulty_judge import (
    GOOD,
    Fault,
    FaultyJudge,
    envelope,
    page,
    pair_question,
    quick_config,
    read_pair,
    said,
)

from rl.system import judge_http
from rl.system.judge_client import Answer, JudgeClient, JudgeError, JudgeRefused, JudgeStats
from rl.system.judge_reply import UnreadableReplyError, chat_content, read_scores, served_models
from rl.system.retry import RETRY_AFTER_CAP_S, retry_after_s

TIMEOUT_S = 0.5
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE_CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(envelope()), envelope())
DEEP = b"[" * 200_000
FLOOD = 2**16


def _dripping(block: bytes, start: bytes = b"") -> Fault:
    """`start`, then `block` every 20 ms for ever: each read is quick, the whole has no end."""

    def blocks() -> Iterator[bytes]:
        yield start
        while True:
            time.sleep(0.02)
            yield block

    return Fault(raw=blocks)


def _flood(block: bytes, start: bytes = b"") -> Fault:
    """`start`, then `block` as fast as it is taken."""
    return Fault(raw=lambda: itertools.chain([start], itertools.repeat(block)))


def ask(judge: FaultyJudge, **config: Any) -> tuple[Answer[Any], JudgeStats]:
    async def run() -> tuple[Answer[Any], JudgeStats]:
        settings = {"timeout_s": TIMEOUT_S, "max_attempts": 2, "breaker_pause_s": 0.05, **config}
        client = JudgeClient(quick_config(**settings), judge.api_base)
        try:
            return await client.ask(pair_question(), read_pair), client.take_stats()
        finally:
            await client.aclose()

    return asyncio.run(run())


READ = {
    "charset base64": page(envelope(), "Content-Type: application/json; charset=base64"),
    "charset undefined": page(envelope(), "Content-Type: application/json; charset=undefined"),
    "charset utf-7": page(envelope(), "Content-Type: application/json; charset=utf-7"),
    "charset rot13": page(envelope(), "Content-Type: text/html; charset=rot13"),
    "a byte order mark": page(b"\xef\xbb\xbf" + envelope()),
    "identity by name": page(envelope(), "Content-Encoding: Identity"),
    "a cookie without end": page(envelope(), "Set-Cookie: a=" + "b" * 50_000),
    "odd bytes in a header": page(envelope(), "X-Odd: \xff\xfe"),
    "words of progress first": said(b"HTTP/1.1 102 Wait\r\n\r\n" * 3, CHUNKED, WHOLE_CHUNKS),
    "half a surrogate pair": page(envelope(GOOD.replace("fine", "fine \ud83d"))),
    "old HTTP, closed at the end": said(b"HTTP/1.0 200 OK\r\n\r\n", envelope()),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_grade_in_an_odd_wrapping_is_read(name: str) -> None:
    with FaultyJudge([READ[name]]) as judge:
        answer, stats = ask(judge)
    assert answer.value == (8.0, 6.5) and stats.requests == 1
    assert answer.replies[0].encode(), "it can be written"


COSTS_ONE_TRY = {
    "unreadable": {
        "gzip": page(gzip.compress(envelope()), "Content-Encoding: gzip"),
        "deflate, twice": page(envelope(), "Content-Encoding: deflate, deflate"),
        "an unknown encoding": page(envelope(), "Content-Encoding: \x1b[2J"),
        "too long": page(b" " * (judge_http.MAX_REPLY_BYTES + 1)),
        "empty under many headers": page(b"", "A: b\r\n" * 5_000),
        "endless": _flood(b" " * FLOOD, b"HTTP/1.1 200 OK\r\n\r\n"),
        "endless chunks": _flood(b"10000\r\n" + b" " * FLOOD + b"\r\n", CHUNKED),
        "empty": page(b""),
        "an HTML page": page(b"<html>\x1b[31mproxy</html>", "Content-Type: text/html"),
        "deep lists": page(DEEP),
        "deep objects": page(b'{"a":' * 100_000),
        "deep beside the reply": page(envelope()[:-1] + b', "x": ' + DEEP + b"}"),
        "an integer of 5000 digits": page(b'{"choices": ' + b"9" * 5000 + b"}"),
        "NaN": page(b"NaN"),
        "UTF-16": page(envelope().decode().encode("utf-16")),
        "not UTF-8": page(b'{"choices": "\xff"}'),
        "raw surrogates": page(b'{"choices": "\xed\xa0\x80"}'),
        "choices an object": page(b'{"choices": {"0": 1}}'),
        "choices a text": page(b'{"choices": "abc"}'),
        "choices empty": page(b'{"choices": []}'),
        "message null": page(b'{"choices": [{"message": null}]}'),
        "a list": page(b"[[]]"),
        "a number": page(b"1e999"),
        "content of parts": page(envelope([{"type": "text", "text": GOOD}])),
        "content a number": page(envelope(10**300)),
        "content null": page(envelope(None)),
        "content too long": page(envelope(" " * 3_000_000)),
        "content with a huge number": page(envelope('{"score": [' + "9" * 5000 + ", 1]}")),
        "content nested": page(envelope('{"score": ' + "[" * 90_000)),
    },
    "transport": {
        "no HTTP": said(b"SSH-2.0-OpenSSH_9.6\r\n"),
        "nothing": said(),
        "a status beyond": page(envelope(), status="099 Odd"),
        "endless header": _flood(b"a" * FLOOD, b"HTTP/1.1 200 OK\r\nX: "),
        "endless headers": _flood(b"A: b\r\n" * 5_000, b"HTTP/1.1 200 OK\r\n"),
        "endless trailers": _flood(b"A: b\r\n" * 5_000, CHUNKED + b"0\r\n"),
        "broken chunks": said(CHUNKED + b"ZZ\r\nhello\r\n"),
        "a negative chunk": said(CHUNKED + b"-5\r\nhello\r\n"),
        "a chunk size without end": _flood(b"0" * FLOOD, CHUNKED),
        "chunks cut": said(CHUNKED + b"ff\r\n{"),
        "an early end": page(envelope(), length=10**6),
        "an impossible length": page(envelope(), "Content-Length: 1"),
        "a negative length": page(envelope(), length=-1),
        "an unknown transfer": page(envelope(), "Transfer-Encoding: gzip"),
        "another protocol": page(b"", "Upgrade: x", status="101 Switching Protocols"),
    },
    "timeout": {
        "a byte at a time": _dripping(b" ", b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"),
        "a header at a time": _dripping(b"A: b\r\n", b"HTTP/1.1 200 OK\r\n"),
        "a status line at a time": _dripping(b"H"),
        "progress for ever": _flood(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
        "hints for ever": _dripping(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"),
        "one-byte chunks": _flood(b"1\r\n \r\n" * 10_000, CHUNKED),
        "chunk extensions": _flood(b"1;" + b"e" * FLOOD + b"\r\n \r\n", CHUNKED),
        "silence": Fault(stall_s=1.5),
    },
    "http_429": {
        f"Retry-After: {value[:12]}": page(b"", f"Retry-After: {value}", status="429 Slow")
        for value in (
            "1e400", "-1", "inf", "nan", "\xd9\xa3", "9" * 5000, "1_0", "Fri, 99 Nov 2025",
            "Fri, 21 Nov 0001 12:00:00 GMT", "Fri, 21 Nov 2025 12:00:00 +" + "9" * 30,
        )
    },
    "http_502": {
        "a compressed page": page(gzip.compress(b"bad"), "Content-Encoding: br", status="502 Bad"),
        "an endless page": _flood(b"<p>" * FLOOD, b"HTTP/1.1 502 Bad\r\n\r\n"),
        "a page that drips": _dripping(b"x", b"HTTP/1.1 502 Bad\r\n\r\n"),
        "a page cut": page(b"bad gateway", status="502 Bad", length=10**6),
        "a page in broken chunks": said(CHUNKED.replace(b"200 OK", b"502 Bad") + b"ZZ\r\n"),
    },
}  # fmt: skip
CASES = [(cause, name) for cause, cases in COSTS_ONE_TRY.items() for name in cases]


@pytest.mark.parametrize(("cause", "name"), CASES)
def test_one_try_is_all_it_costs(cause: str, name: str) -> None:
    with FaultyJudge([COSTS_ONE_TRY[cause][name]]) as judge:
        answer, stats = ask(judge)
    assert answer.value == (8.0, 6.5) and stats.requests == 2
    assert stats.retries == {cause: 1}
    assert answer.seconds < TIMEOUT_S + 1.5, "the deadline is that of the whole request"


def test_a_judge_that_says_nothing_else_ends_as_a_failed_question_in_printable_words() -> None:
    page_of_escapes = page(b"\x1b[2J\xe2\x80\xae" + b"A\r\nB" * 9999, status="500 \x1b[2J")
    for fault, word in ((page_of_escapes, "http_500"), (page(b"\x00\x1b]0;x\x07"), "unreadable")):
        with FaultyJudge(after=fault) as judge:
            answer, _ = ask(judge)
        failure = answer.failure or ""
        print(f"\n{failure[:200]}")
        assert answer.value is None and failure.startswith(f"{word}: ") and "\\x1b" in failure
        assert failure.isprintable() and len(failure) < 800


WRONG_SET_UP = {
    "compressed": page(gzip.compress(b"no"), "Content-Encoding: gzip", status="401 No"),
    "cut": page(b"wrong key", status="401 No", length=10**6),
    "endless": _flood(b"wrong key " * FLOOD, b"HTTP/1.1 403 No\r\n\r\n"),
    "dripping": _dripping(b"x", b"HTTP/1.1 401 No\r\n\r\nwrong key"),
    "in broken chunks": said(CHUNKED.replace(b"200 OK", b"404 No") + b"9\r\nwrong key\r\nZZ\r\n"),
    "in another charset": page(b"wrong key", "Content-Type: a/b; charset=base64", status="404 No"),
    "with escapes": page(b"wrong key\x1b[2J\xe2\x80\xae\r\nfine", status="403 No"),
}


@pytest.mark.parametrize("name", WRONG_SET_UP)
def test_a_refusal_stops_at_once_whatever_its_page_holds(name: str) -> None:
    with FaultyJudge(after=WRONG_SET_UP[name]) as judge, pytest.raises(JudgeRefused) as refused:
        ask(judge)
    assert len(judge.requests) == 1
    message = str(refused.value)
    print(f"\n{message[:300]}")
    assert re.search("wrong key|a body compressed .Content-Encoding: gzip", message)
    assert message.replace("\n", "", 1).isprintable() and len(message) < 1200


@pytest.mark.parametrize(
    ("location", "seen"),
    [
        ("http://xn--a.example/", "http://xn--a.example/"),
        ("http://\xff\xfe/", "http://\xff\xfe/"),
        ("http://[::1", "http://[::1"),
        ("\x1b[2J", "\\x1b[2J"),
        ("http://h:99999/", "http://h:99999/"),
        ("x" * 5000, "x" * 200 + "..."),
        ("", "Remedy: "),
    ],
)
def test_a_redirect_is_refused_and_not_followed(location: str, seen: str) -> None:
    fault = page(b"", f"Location: {location}", status="307 Elsewhere")
    with FaultyJudge(after=fault) as judge, pytest.raises(JudgeRefused) as refused:
        ask(judge)
    assert len(judge.requests) == 1 and seen in str(refused.value)


def test_the_key_goes_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_JUDGE", "sk-very-secret-0123456789")
    with FaultyJudge() as elsewhere, FaultyJudge() as judge:
        judge.after = page(b"", f"Location: {elsewhere.api_base}/x", status="308 Moved")
        with pytest.raises(JudgeRefused, match=re.escape(f"points ({elsewhere.api_base}/x)")):
            ask(judge, api_key_env="MY_JUDGE")
    assert not elsewhere.requests


def test_nothing_compressed_is_asked_for_and_no_cookie_is_kept() -> None:
    with FaultyJudge([Fault(reply="hm", headers={"Set-Cookie": "a=b"})]) as judge:
        ask(judge)
    assert [headers["Accept-Encoding"] for headers in judge.headers] == ["identity"] * 2
    assert not any("Cookie" in headers for headers in judge.headers)


def _health(judge: FaultyJudge) -> None:
    async def run() -> None:
        client = JudgeClient(quick_config(), judge.api_base)
        try:
            await client.check_health(wait_s=0)
        finally:
            await client.aclose()

    asyncio.run(run())


@pytest.mark.parametrize(("cause", "name"), CASES)
def test_a_health_check_ends_in_words_too(
    cause: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl.system.judge_client.HEALTH_TIMEOUT_S", TIMEOUT_S)
    with FaultyJudge() as judge:
        judge.models = COSTS_ONE_TRY[cause][name]
        started = time.monotonic()
        with pytest.raises(JudgeError) as error:
            _health(judge)
    assert time.monotonic() - started < TIMEOUT_S + 1.5
    assert str(error.value).replace("\n", "", 1).isprintable() and len(str(error.value)) < 1200


@pytest.mark.parametrize("names", [["\x1b[2J" * 999] * 20, [f"m\n{n}" for n in range(20)]])
def test_the_models_that_are_served_are_shown_safely(names: list[str]) -> None:
    with FaultyJudge() as judge:
        judge.models = page(json.dumps({"data": [{"id": name} for name in names]}).encode())
        with pytest.raises(JudgeRefused, match=r"does not serve judge\.model") as error:
            _health(judge)
    assert str(error.value).isprintable() and len(str(error.value)) < 1500


PEAK = """
import asyncio, sys
sys.path[:0] = ["tests"]
from tiny_faulty_judge import pair_question, quick_config, read_pair
from rl.system.judge_client import JudgeClient

def peak_mb():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

async def main():
    client = JudgeClient(quick_config(max_attempts=2), sys.argv[1])
    answer = await client.ask(pair_question("a good one first"), read_pair)
    assert answer.value is not None, answer
    before = peak_mb()
    answer = await client.ask(pair_question("now the bomb"), read_pair)
    print(peak_mb() - before, answer.seconds, (answer.failure or "no failure")[:300])
    await client.aclose()

asyncio.run(main())
"""


def _bomb() -> bytes:
    """1 MB of gzip that inflates to 1 GB of spaces."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    blank = b" " * 2**24
    blocks = [packer.compress(blank) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2)]
    return blocks[0] + blocks[1] * 63


@pytest.mark.parametrize("what", ["bomb", "endless"])
def test_memory_stays_bounded(what: str) -> None:
    """In a process of its own: this one's peak is that of all tests before."""
    fault = page(_bomb(), "Content-Encoding: gzip") if what == "bomb" else None
    fault = fault or _flood(b" " * FLOOD, b"HTTP/1.1 200 OK\r\n\r\n")
    with FaultyJudge([Fault()], after=fault) as judge:
        command = [sys.executable, "-c", PEAK, judge.api_base]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    print(f"\n{what}: MB, s, failure: {done.stdout}", end="")
    rise_mb, seconds, failure = done.stdout.split(" ", 2)
    assert float(rise_mb) < 50 and float(seconds) < 10
    assert failure.startswith("unreadable: HTTP 200 with a body ")


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


@pytest.mark.parametrize("seed", range(3))
def test_any_answer_over_a_socket_leaves_the_next_question_its_grade(seed: int) -> None:
    """And when the judge is well again, so is the client."""
    rng = random.Random(100 + seed)

    async def run(judge: FaultyJudge) -> list[Answer[Any]]:
        config = quick_config(timeout_s=TIMEOUT_S, max_attempts=2, max_outage_s=1.0)
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
