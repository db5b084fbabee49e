"""Arbitrary bytes from a judge cost one try of one question; real sockets."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from tiny_faulty_judge import (
    GOOD,
    Fault,
    FaultyJudge,
    answers_of,
    ask_one,
    dripping,
    envelope,
    page,
    pair_question,
    raw,
)
from tiny_messages import raising

from rl.judge import http as judge_http
from rl.judge.client import Answer, JudgeRefused, JudgeStats

TIMEOUT_S = 2.0
"""Long enough for a correct answer on a busy machine."""
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DEEP = b"[" * 200_000
FLOOD = 2**16


def flood(block: bytes, start: bytes = b"") -> Fault:
    """`start`, then `block` without end, as fast as the client reads."""
    return Fault(raw=lambda: itertools.chain([start], itertools.repeat(block)))


QUICK = {"timeout_s": TIMEOUT_S, "max_attempts": 2, "max_concurrency": 1}


READ = {
    "charset base64": page(envelope(), "Content-Type: application/json; charset=base64"),
    "charset undefined": page(envelope(), "Content-Type: application/json; charset=undefined"),
    "charset utf-7": page(envelope(), "Content-Type: application/json; charset=utf-7"),
    "charset rot13": page(envelope(), "Content-Type: text/html; charset=rot13"),
    "a byte order mark": page(b"\xef\xbb\xbf" + envelope()),
    "identity by name": page(envelope(), "Content-Encoding: Identity"),
    "a cookie without end": page(envelope(), "Set-Cookie: a=" + "b" * 50_000),
    "odd bytes in a header": page(envelope(), "X-Odd: \xff\xfe"),
    "interim responses first": raw(
        b"HTTP/1.1 102 Wait\r\n\r\n" * 3,
        CHUNKED,
        b"%x\r\n%s\r\n0\r\n\r\n" % (len(envelope()), envelope()),
    ),
    "half a surrogate pair": page(envelope(GOOD.replace("fine", "fine \ud83d"))),
    "old HTTP, closed at the end": raw(b"HTTP/1.0 200 OK\r\n\r\n", envelope()),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_grade_in_an_unusual_response_is_read(name: str) -> None:
    with FaultyJudge([READ[name]]) as judge:
        answer, stats = ask_one(judge, **QUICK)
    assert answer.value == (8.0, 6.5) and stats.requests == 1
    assert answer.replies[0].encode(), "it can be written to a file"


COSTS_ONE_TRY = {
    "no_reply": {
        "gzip": page(gzip.compress(envelope()), "Content-Encoding: gzip"),
        "deflate, twice": page(envelope(), "Content-Encoding: deflate, deflate"),
        "an unknown encoding": page(envelope(), "Content-Encoding: \x1b[2J"),
        "too long": page(b" " * (judge_http.MAX_REPLY_BYTES + 1)),
        "empty under many headers": page(b"", "A: b\r\n" * 5_000),
        "endless": flood(b" " * FLOOD, b"HTTP/1.1 200 OK\r\n\r\n"),
        "endless chunks": flood(b"10000\r\n" + b" " * FLOOD + b"\r\n", CHUNKED),
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
        "an error beside a reply": page(envelope()[:-1] + b', "error": {"message": "x"}}'),
        "two messages": page(envelope().replace(b'"message"', b'"message": {}, "message"')),
        "two lists of choices": page(b'{"choices": [], ' + envelope()[1:]),
        "a number": page(b"1e999"),
        "content of parts": page(envelope([{"type": "text", "text": GOOD}])),
        "content a number": page(envelope(10**300)),
        "content too long": page(envelope(" " * 3_000_000)),
    },
    "unreadable": {
        "content null": page(envelope(None)),
        "content with a huge number": page(envelope('{"score": [' + "9" * 5000 + ", 1]}")),
        "content nested": page(envelope('{"score": ' + "[" * 90_000)),
    },
    "transport": {
        "no HTTP": raw(b"SSH-2.0-OpenSSH_9.6\r\n"),
        "nothing": raw(),
        "a status beyond": page(envelope(), status="099 Odd"),
        "endless header": flood(b"a" * FLOOD, b"HTTP/1.1 200 OK\r\nX: "),
        "endless headers": flood(b"A: b\r\n" * 5_000, b"HTTP/1.1 200 OK\r\n"),
        "endless trailers": flood(b"A: b\r\n" * 5_000, CHUNKED + b"0\r\n"),
        "broken chunks": raw(CHUNKED + b"ZZ\r\nhello\r\n"),
        "a negative chunk": raw(CHUNKED + b"-5\r\nhello\r\n"),
        "a chunk size without end": flood(b"0" * FLOOD, CHUNKED),
        "chunks cut": raw(CHUNKED + b"ff\r\n{"),
        "an impossible length": page(envelope(), "Content-Length: 1"),
        "a negative length": page(envelope(), length=-1),
        "an unknown transfer": page(envelope(), "Transfer-Encoding: gzip"),
        "another protocol": page(b"", "Upgrade: x", status="101 Switching Protocols"),
    },
    "timeout": {
        "a header at a time": dripping(b"A: b\r\n", b"HTTP/1.1 200 OK\r\n"),
        "a status line at a time": dripping(b"H"),
        "progress for ever": flood(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
        "hints for ever": dripping(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"),
        "one-byte chunks": flood(b"1\r\n \r\n" * 10_000, CHUNKED),
        "chunk extensions": flood(b"1;" + b"e" * FLOOD + b"\r\n \r\n", CHUNKED),
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
        "an endless page": flood(b"<p>" * FLOOD, b"HTTP/1.1 502 Bad\r\n\r\n"),
        "a page that drips": dripping(b"x", b"HTTP/1.1 502 Bad\r\n\r\n"),
        "a page cut": page(b"bad gateway", status="502 Bad", length=10**6),
        "a page in broken chunks": raw(CHUNKED.replace(b"200 OK", b"502 Bad") + b"ZZ\r\n"),
    },
}  # fmt: skip
CASES = [(cause, name) for cause, cases in COSTS_ONE_TRY.items() for name in cases]


@pytest.mark.slow
def test_each_invalid_response_costs_one_try() -> None:
    """Sixteen cases run at a time, because a third of them wait for a time-out."""

    def answer_to(case: tuple[str, str]) -> tuple[Answer[Any], JudgeStats]:
        cause, name = case
        with FaultyJudge([COSTS_ONE_TRY[cause][name]]) as judge:
            return ask_one(judge, **QUICK)

    with ThreadPoolExecutor(16) as pool:
        outcomes = list(zip(CASES, pool.map(answer_to, CASES), strict=True))
    for case, (answer, stats) in outcomes:
        assert answer.value == (8.0, 6.5) and stats.requests == 2, case
        assert stats.retries == {case[0]: 1}, case
        assert answer.seconds < TIMEOUT_S + 8, "the deadline is for the whole request"


def test_a_question_with_only_invalid_responses_fails_with_a_printable_reason() -> None:
    page_of_escapes = page(b"\x1b[2J\xe2\x80\xae" + b"A\r\nB" * 9999, status="500 \x1b[2J")
    for fault, word in ((page_of_escapes, "http_500"), (page(b"\x00\x1b]0;x\x07"), "no_reply")):
        with FaultyJudge(after=fault) as judge:
            answer, _ = ask_one(judge, **QUICK)
        failure = answer.failure or ""
        assert answer.value is None and failure.startswith(f"{word}: ") and "\\x1b" in failure
        assert failure.isprintable() and len(failure) < 800


WRONG_SET_UP = {
    "compressed": page(gzip.compress(b"no"), "Content-Encoding: gzip", status="401 No"),
    "cut": page(b"wrong key", status="401 No", length=10**6),
    "endless": flood(b"wrong key " * FLOOD, b"HTTP/1.1 403 No\r\n\r\n"),
    "dripping": dripping(b"x", b"HTTP/1.1 401 No\r\n\r\nwrong key"),
    "in broken chunks": raw(CHUNKED.replace(b"200 OK", b"404 No") + b"9\r\nwrong key\r\nZZ\r\n"),
    "in another charset": page(b"wrong key", "Content-Type: a/b; charset=base64", status="404 No"),
    "with escapes": page(b"wrong key\x1b[2J\xe2\x80\xae\r\nfine", status="403 No"),
}


@pytest.mark.parametrize("name", WRONG_SET_UP)
def test_a_refusal_stops_at_once_whatever_its_page_contains(name: str) -> None:
    with FaultyJudge(after=WRONG_SET_UP[name]) as judge, pytest.raises(JudgeRefused) as refused:
        ask_one(judge, **QUICK)
    assert len(judge.requests) == 1
    message = str(refused.value)
    assert re.search("wrong key|compressed .Content-Encoding: gzip", message)
    assert message.replace("\n", "", 1).isprintable() and len(message) < 1200


@pytest.mark.parametrize(
    ("location", "fragment"),
    [
        ("http://xn--a.example/", "http://xn--a.example/"),
        ("\x1b[2J", "\\x1b[2J"),
        ("x" * 5000, "x" * 200 + "..."),
        ("", "Remedy: "),
    ],
)
def test_a_redirect_is_refused_and_not_followed(location: str, fragment: str) -> None:
    fault = page(b"", f"Location: {location}", status="307 Elsewhere")
    with FaultyJudge(after=fault) as judge, pytest.raises(JudgeRefused) as refused:
        ask_one(judge, **QUICK)
    assert len(judge.requests) == 1 and fragment in str(refused.value)


def test_the_key_is_not_sent_to_the_target_of_a_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_JUDGE", "sk-very-secret-0123456789")
    with FaultyJudge() as elsewhere, FaultyJudge() as judge:
        judge.after = page(b"", f"Location: {elsewhere.api_base}/x", status="308 Moved")
        with pytest.raises(JudgeRefused, match=re.escape(f"points ({elsewhere.api_base}/x)")):
            ask_one(judge, api_key_env="MY_JUDGE")
    assert not elsewhere.requests


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("environment", "proxied"),
    [
        ({}, False),
        ({"HTTP_PROXY": "{proxy}"}, True),
        ({"ALL_PROXY": "http://{proxy}"}, True),
        ({"HTTPS_PROXY": "{proxy}"}, False),
        ({"HTTP_PROXY": "{proxy}", "NO_PROXY": "other,judge.test"}, False),
        ({"HTTP_PROXY": "{proxy}", "NO_PROXY": "*"}, False),
    ],
)
def test_a_proxy_in_the_environment_is_used_for_other_machines(
    environment: dict[str, str], proxied: bool, bare_environment: pytest.MonkeyPatch
) -> None:
    with FaultyJudge() as proxy:
        for name, value in environment.items():
            address = proxy.api_base.split("/")[2]
            bare_environment.setenv(name, value.format(proxy=address))
        http = judge_http.JudgeHttp("http://judge.test:1/v1", {}, max_connections=1)
        request = http.request("GET", "/models", None, TIMEOUT_S)
        if proxied:
            # The stand-in refuses absolute URLs: its error shows that the proxy was asked.
            assert b"no such path: http://judge.test:1/v1/models" in asyncio.run(request).body
        else:
            with pytest.raises(judge_http.RequestTrouble):
                asyncio.run(request)


@pytest.mark.parametrize(
    ("name", "value", "api_base", "parts"),
    [
        ("HTTP_PROXY", "socks5://proxy:1080", "http://judge.test/v1", "socksio ... NO_PROXY"),
        ("ALL_PROXY", "ftp://proxy:21", "http://judge.test/v1", "ftp ... NO_PROXY"),
        ("HTTPS_PROXY", "http://[::1", "https://judge.test/v1", "http://host:port"),
        ("HTTP_PROXY", "http://\u2603:x", "http://judge.test/v1", "http://host:port"),
        ("SSL_CERT_FILE", "/none.pem", "https://judge.test/v1", "/none.pem ... No such file"),
        ("SSL_CERT_FILE", "/dev/null", "https://judge.test/v1", "/dev/null ... unset it"),
    ],
)
def test_a_wrong_environment_variable_is_named_in_the_error(
    name: str, value: str, api_base: str, parts: str, bare_environment: pytest.MonkeyPatch
) -> None:
    bare_environment.setenv(name, value)
    with raising(ValueError, f"{name} ... {parts}"):
        judge_http.JudgeHttp(api_base, {}, max_connections=1)
    judge_http.JudgeHttp("http://127.0.0.1:1/v1", {}, max_connections=1)  # uses neither


def test_a_second_reply_to_one_request_grades_no_other_question() -> None:
    def twice() -> Iterator[bytes]:
        for reply in (GOOD, '{"score": [10, 10]}'):
            body = envelope(reply)
            yield b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    with FaultyJudge(after=Fault(raw=twice, keeps_open=True)) as judge:
        answers = answers_of(judge.client(max_concurrency=1), map(pair_question, "abcd"))
    assert [answer.value for answer in answers] == [(8.0, 6.5)] * 4


def test_requests_ask_for_no_compression_and_keep_no_cookie() -> None:
    with FaultyJudge([Fault(reply="hm", headers={"Set-Cookie": "a=b"})]) as judge:
        ask_one(judge, **QUICK)
    assert [headers["Accept-Encoding"] for headers in judge.headers] == ["identity"] * 2
    assert not any("Cookie" in headers for headers in judge.headers)


NOON = datetime(2025, 11, 21, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("86400", 120.0),
        ("Fri, 21 Nov 2025 12:00:30 GMT", 30.0),
        ("Fri, 21 Nov 2025 13:00:30 +0100", 30.0),
        ("Fri, 21 Nov 2025 11:00:00 GMT", 0.0),
        ("Sat, 22 Nov 2025 12:00:00 GMT", 120.0),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(
    header: str | None, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_http.time, "time", NOON.timestamp)
    assert judge_http.retry_after_s(header) == seconds
