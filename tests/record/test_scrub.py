"""Scrubbing replaces keys in every encoding, and nothing else."""

from __future__ import annotations

import base64
import html
import json
import time
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from rl.text.scrub import is_placeholder, is_secret_name, scrub, scrubbed, secrets

KEY = "sk-Live/9aZ+qT_7~x"


@pytest.fixture(autouse=True)
def one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", KEY)


def encodings(key: str) -> Iterator[str]:
    yield from (key, key.upper(), quote(key), quote(key, safe=""), key.replace("/", "\\/"))
    yield from (html.escape(key), key.encode().hex(), key.encode().hex().upper())
    for form in ("%{:02x}", "%{:02X}", "\\u{:04x}", "\\u{:04X}", "\\x{:02x}", "&#{};", "&#x{:X};"):
        every = "".join(form.format(ord(char)) for char in key)
        yield every
    for before in ("", "a", "ab", "Bearer ", "user:", "name:", '{"key": "'):
        for after in ("", "x", "xy"):
            coded = base64.b64encode((before + key + after).encode()).decode()
            yield from (coded, coded.rstrip("=").replace("+", "-").replace("/", "_"))


@pytest.mark.parametrize(
    "around", ["{}", "said: {} (sic)", "two\n{}\nlines", "\\{}", "http://h/?k={}&l=1", "<p>{}</p>"]
)
def test_a_key_is_found_in_every_encoding(around: str) -> None:
    for encoded in encodings(KEY):
        text = around.format(encoded)
        assert "<MY_API_KEY>" in scrub(text), text
        assert encoded not in scrub(text) and KEY not in scrub(text)
        line = json.dumps({"reply": text, "größe": "\n"}, ensure_ascii=False)
        read_again = json.loads(scrub(line))  # it is still JSON
        assert "<MY_API_KEY>" in read_again["reply"] and read_again["größe"] == "\n"
    assert scrub(around.format("sk-Live/9aZ+qT_8~x")) == around.format("sk-Live/9aZ+qT_8~x")


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
        ("DATABASE_URL", "postgres://me:hunter2%40hunter@db/x", "hunter2@hunter"),
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
    placeholders = (
        "EMPTY",
        "none",
        "dummy",
        "sk-no-key",
        "sk-no-key-required",
        "not needed",
        "-",
        "NO_KEY",
    )
    assert all(map(is_placeholder, placeholders))
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
