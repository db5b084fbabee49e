"""Scrubbing replaces keys in every encoding, and nothing else."""

from __future__ import annotations

import base64
import html
import json
import re
import time
from collections.abc import Callable
from functools import partial
from html.entities import codepoint2name
from urllib.parse import quote, quote_plus

import markupsafe
import pytest

from rl.printing import is_placeholder, is_secret_name, scrub, scrubbed, secrets

KEY = "sk-Live/9aZ+qT_7~x"
HARD_KEYS = [
    'pass word/it\'s+"q" <1>',
    "Grün-aus-Köln-é",
    "pin-\U0001f511-C:\\new&co",
    "a%2Fb&amp;c''d\\n5",
]


def in_all(form: str, text: str | bytes) -> str:
    return "".join(form.format(char if isinstance(char, int) else ord(char)) for char in text)


Spell = Callable[[str], str]
PARTLY: dict[str, Spell] = {
    "itself": str,
    "upper case": str.upper,
    "percent": quote,
    "percent, slash too": partial(quote, safe=""),
    "encodeURIComponent": partial(quote, safe="!'()*~"),
    "a form's data": quote_plus,
    "JSON": lambda key: json.dumps(key)[1:-1],
    "JSON without ASCII": lambda key: json.dumps(key, ensure_ascii=False)[1:-1],
    "JSON's slash": lambda key: json.dumps(key)[1:-1].replace("/", "\\/"),
    "HTML": html.escape,
    "HTML of jinja2": lambda key: str(markupsafe.escape(key)),
    "HTML in names": lambda key: "".join(
        f"&{codepoint2name[ord(c)]};" if ord(c) in codepoint2name else c for c in key
    ),
    "Python": lambda key: repr(key)[1:-1],
    "Python's bytes": lambda key: repr(key.encode())[2:-1],
    "a shell, backslashes": lambda key: re.sub(r"([ -/:-@[-`{-~])", r"\\\1", key),
    "bytes as latin-1": lambda key: key.encode().decode("latin-1"),
}
ONCE = ("upper case", "bytes as latin-1")
EVERY: dict[str, Spell] = {
    "percent": lambda key: in_all("%{:02x}", key.encode()),
    "PERCENT": lambda key: in_all("%{:02X}", key.encode()),
    "percent of characters": lambda key: in_all("%{:02x}", key) if key.isascii() else quote(key),
    "JSON": lambda key: "".join(
        json.dumps(c)[1:-1] if c > "\xff" else f"\\u{ord(c):04x}" for c in key
    ),
    "hexadecimal bytes": lambda key: in_all("\\x{:02X}", key.encode()),
    "HTML": partial(in_all, "&#{};"),
    "HTML without semicolons": partial(in_all, "&#{}"),
    "HTML, hexadecimal": partial(in_all, "&#x{:X};"),
}
WHOLE: dict[str, Spell] = {
    "hexadecimal": lambda key: key.encode().hex(),
    "HEXADECIMAL": lambda key: key.encode().hex().upper(),
    **{
        f"base64 of {before}..{after}": lambda key, around=(before, after): base64.b64encode(
            key.join(around).encode()
        ).decode()
        for before in ("", "a", "ab", "Bearer ", "user:", "name:", '{"key": "')
        for after in ("", "x", "xy")
    },
}


SPELLINGS = {f"{name}, where needed": spell for name, spell in PARTLY.items()}
SPELLINGS |= {f"{name}, every character": spell for name, spell in EVERY.items()} | WHOLE
SPELLINGS |= {
    f"{outer} of {inner}": lambda key, do=(first, second): do[1](do[0](key))
    for inner, first in PARTLY.items()
    for outer, second in {
        "base64 of URLs": lambda text: (
            base64.urlsafe_b64encode(f"user:{text}".encode()).decode().rstrip("=")
        ),
        "base64 in lines": lambda text: base64.encodebytes(f"{'x' * 90}: {text}".encode()).decode(),
        "JSON": PARTLY["JSON"],
        "JSON in JSON": lambda text: json.dumps(json.dumps(text))[1:-1],
        "percent": PARTLY["percent, slash too"],
        "percent of percent": lambda text: quote(quote(text, safe=""), safe=""),
        "HTML": html.escape,
    }.items()
    if inner == "itself" or ("base64" not in outer and inner not in ONCE)
}


@pytest.fixture(autouse=True)
def one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", KEY)


AROUND = [
    "{}",
    "said: {} (sic)",
    "two\n{}\nlines",
    "\\{}",
    "http://h/?k={}&l=1",
    "<p>{}</p>",
    "/v1/a/{}",
]


@pytest.mark.parametrize("key", [KEY, *HARD_KEYS], ids=range(1 + len(HARD_KEYS)))
def test_a_key_is_found_in_every_encoding(key: str, monkeypatch) -> None:
    monkeypatch.setenv("MY_API_KEY", key)
    for name, spell in SPELLINGS.items():
        encoded = spell(key)
        for around in AROUND:
            text, before, after = around.format(encoded), *around.split("{}")
            scrubbed_text = scrub(text)
            assert "<MY_API_KEY>" in scrubbed_text, (name, text)
            assert encoded not in scrubbed_text and key not in scrubbed_text, (name, text)
            if name not in WHOLE and "base64" not in name:
                assert before.rstrip("\\") in scrubbed_text and after in scrubbed_text, (name, text)
            line = scrub(json.dumps({"reply": text, "größe": "\n"}, ensure_ascii=False))
            read_again = json.loads(line)  # it is still JSON
            assert "<MY_API_KEY>" in read_again["reply"] and read_again["größe"] == "\n", name


def test_text_without_a_key_is_unchanged() -> None:
    for name, spell in SPELLINGS.items():
        for around in AROUND:
            text = around.format(spell("sk-Live/9aZ+qT_8~x")) + "\0\1\u0130\ud800"
            assert scrub(text) == text, name


def test_text_around_a_key_is_kept_except_within_the_same_base64() -> None:
    coded = base64.b64encode(f"Bearer {KEY}".encode()).decode()
    assert scrub(f"Basic {coded}, then {KEY}.") == "Basic <MY_API_KEY>, then <MY_API_KEY>."
    assert scrubbed({KEY: [KEY, 1, None, (KEY,)]}) == {
        "<MY_API_KEY>": ["<MY_API_KEY>", 1, None, ["<MY_API_KEY>"]]
    }


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("DB_PASS", "hunter2-hunter2", "hunter2-hunter2"),
        ("PGPASSWORD", "hunter2-hunter2", "hunter2-hunter2"),
        ("MYSQL_PWD", "hunter2-hunter2", "hunter2-hunter2"),
        ("GITHUB_PAT", "ghp_0123456789", "ghp_0123456789"),
        ("githubToken", "ghp_0123456789", "ghp_0123456789"),
        ("OPENAI_API_KEY_2", "sk-0123456789", "sk-0123456789"),
        ("APP__KEY", "sk-0123456789", "sk-0123456789"),
        ("REDISCLI_AUTH", "hunter2-hunter2", "hunter2-hunter2"),
        ("AUTH", "Bearer sk-0123456789", "sk-0123456789"),
        ("AUTH", "user:hunter2-hunter2", "hunter2-hunter2"),
        ("COOKIE", "sid=0123456789; theme=dark", "0123456789"),
        ("PRIVATE_KEY", "-----BEGIN-----\nMIIEvQIBADAN\n-----END-----", "MIIEvQIBADAN"),
        ("SENTRY_DSN", "https://0123456789abcdef0123@sentry.io/1", "0123456789abcdef0123"),
        ("PG_DSN", "host=db user=me password=hunter2-hunter2", "hunter2-hunter2"),
        ("DATABASE_URL", "postgres://me:hunter2-hunter2@db:5432/x", "hunter2-hunter2"),
        ("DATABASE_URL", "postgres://me:hunter2%40hunter@db/x", "hunter2%40hunter"),
        ("BROKER", "amqp://me:hunter/hunter2@mq", "hunter/hunter2"),
        ("HTTPS_PROXY", "http://me:hunter2-hunter2@proxy:3128", "hunter2-hunter2"),
        ("PIP_INDEX_URL", "https://ghp_0123456789abcdef@host/simple", "ghp_0123456789abcdef"),
        ("BUCKET", "https://host/x?sv=1&sig_token=0123456789", "0123456789"),
        ("ACCOUNT", '{"kind": "x", "private_key": "0123456789ab"}', "0123456789ab"),
        ("SLACK_WEBHOOK_URL", "https://hooks.example.org/T0/B1", "https://hooks.example.org/T0/B1"),
        ("STORAGE", "AccountName=me;AccountKey=0123456789==", "0123456789=="),
    ],
    ids=lambda value: value[:4],  # pytest puts the id into the environment
)
def test_what_counts_as_a_secret(name: str, value: str, secret: str, monkeypatch) -> None:
    monkeypatch.setenv(name, value)
    assert (name, secret) in secrets()
    assert secret not in scrub(f"said {secret} once")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "yes-in-parallel"),
        ("PWD", "/home/somebody"),
        ("OLDPWD", "/home/somebody"),
        ("SSH_AUTH_SOCK", "/tmp/ssh-0123456789/agent"),
        ("API_KEY_FILE", "/run/secrets/key"),
        ("SSH_KEY", "~/././././."),
        ("VLLM_API_KEY", "not-needed"),
        ("OPENAI_API_KEY", "sk-no-key-required"),
        ("SHORT_KEY", "abc4567"),
        ("AUTH_METHOD", "certificate"),
        ("TOKEN_URL", "https://login.example.org/token"),
        ("COMPASS_SIZE", "1024 by 768"),
        ("DATABASE_URL", "postgres://somebody@db:5432/x"),
        ("HOME_PAGE", "https://example.org:8080/path"),
    ],
    ids=lambda value: value[:4],
)
def test_what_does_not_count_as_a_secret(name: str, value: str, monkeypatch) -> None:
    monkeypatch.setenv(name, value)
    assert [key_name for key_name, _ in secrets()] == ["MY_API_KEY"]


def test_placeholders_and_names_of_secrets_are_recognised() -> None:
    placeholders = "EMPTY|none|dummy|sk-no-key|sk-no-key-required|not needed|-|NO_KEY"
    assert all(map(is_placeholder, placeholders.split("|")))
    assert not any(map(is_placeholder, ("sk-1234", "s3cret", "sk-nokey1")))
    assert not any(map(is_secret_name, ("PATH", "LANG", "MONEY", "AUTHOR", "COMPASSION", "PATCH")))


def test_scrubbing_is_fast_enough_for_episodes_and_hostile_text() -> None:
    row = {
        "completion": 'Make "it" red.\n' * 40,
        "token_ids": list(range(1000)),
        "reply": "{}" * 99,
    }
    started = time.perf_counter()
    for _ in range(128):
        scrubbed(row)
    for text in ("\\" * 100_000, "%41" * 50_000, "A" * 200_000, quote(KEY, safe="") * 2_000):
        scrub(text)
    assert time.perf_counter() - started < 3
