"""Valid and invalid values of judge.api_base and judge.api_key_env."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.judge.http import auth_header, is_loopback, resolve_api_base, resolve_api_bases
from rl.printing import scrub


@pytest.mark.parametrize(
    ("value", "resolved"),
    [
        ("http://judge:4877", "http://judge:4877/v1"),
        ("http://judge:4877/", "http://judge:4877/v1"),
        ("http://judge:4877/v1", "http://judge:4877/v1"),
        (" http://judge:4877/v1/ ", "http://judge:4877/v1"),
        ("http://judge:4877/v1/chat/completions", "http://judge:4877/v1"),
        ("judge:4877", "http://judge:4877/v1"),
        ("10.0.0.7:4877/v1", "http://10.0.0.7:4877/v1"),
        ("https://host.example/api/v1", "https://host.example/api/v1"),
        ("https://host.example/v1beta/openai/", "https://host.example/v1beta/openai"),
        ("http://[::1]:4877", "http://[::1]:4877/v1"),
        ("http://my_judge:4877", "http://my_judge:4877/v1"),
        ("http://b\u00fccher.example", "http://b\u00fccher.example/v1"),
    ],
)
def test_a_url_is_completed_to_an_api_base(value: str, resolved: str) -> None:
    assert resolve_api_base(value) == resolved


A, B = "http://a:4877/v1", "https://b.example/v1"


@pytest.mark.parametrize(
    "value",
    [
        ["a:4877", "https://b.example"],
        "http://a:4877, https://b.example/v1/",
        ["a:4877,https://b.example", "http://a:4877/v1"],
        "FILE",
        ["FILE"],
        "a:4877,FILE",
    ],
)
def test_several_addresses_as_list_text_or_file(value: str | list[str], tmp_path: Path) -> None:
    file = tmp_path / "judges"
    file.write_text("a:4877 the first\n\nhttps://b.example # the second\na:4877\n")
    items = [value] if isinstance(value, str) else value
    items = [item.replace("FILE", str(file)) for item in items]
    assert resolve_api_bases(items[0] if isinstance(value, str) else items) == (A, B)
    with pytest.raises(ValueError, match=r"2 addresses.* drop start_command"):
        resolve_api_base(items[0] if isinstance(value, str) else items)


def test_one_wrong_address_of_several_is_named(tmp_path: Path) -> None:
    file = tmp_path / "judges"
    file.write_text("http://a:4877\nb@d!\n")  # pragma: allowlist secret
    for value, problem in (
        (["a:4877", "judge"], "'judge' is neither"),
        ("me:hunter2@a:4877", "'...@a:4877' is neither"),
        (str(file), f"{file}: line 2 "),
    ):
        with pytest.raises(ValueError, match=r"judge\.api_base.*") as error:
            resolve_api_bases(value)
        assert problem in str(error.value)
        assert "b@d" not in str(error.value), "it may be a password"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("/no/such/file", "nor a file that exists"),
        ("judge", "nor a file that exists"),
        ("ftp://judge/v1", "not an http"),
        ("http://", "not an http"),
        ("http://\u0663.3.3.3/", "Invalid IDNA hostname"),
        ("http://\ud800/", "Invalid IDNA hostname"),
        ("http://\u2100.com", "NFKC"),
        ("http://h:x", "Invalid port"),
        ("http://[::1", "Invalid IPv6"),
        ("http://h/\x00", "non-printable"),
        ("http://h/\ud800", "surrogates"),
        ("a" * 5000, "nor a file that exists"),
        ("a\x00b", "nor a file that exists"),
        *(
            (value, r"is empty.*judge\.start_command")
            for value in ("", "none", "None", "  ", ["", " "])
        ),
        ("https://me:hunter2@host/v1", r"judge\.api_key_env"),
        ("https://host/v1?key=hunter2", r"judge\.api_key_env"),
        ("http://me:hunter2@[::1", r"judge\.api_key_env"),
    ],
)
def test_an_invalid_address_is_refused_with_the_reason(value: str | list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        resolve_api_base(value)
    assert "judge.api_base" in str(error.value) and "hunter2" not in str(error.value)
    str(error.value).encode()


@pytest.mark.parametrize(
    ("content", "reason"),
    [("\n", "is empty"), ("b@d!", "neither"), ("gpu-7", "neither"), ("x" * 9999, "longer")],
)
def test_a_file_without_an_address_is_refused(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "judge_host"
    path.write_text(content)
    with pytest.raises(ValueError, match=reason):
        resolve_api_base(str(path))


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "export MY_JUDGE="),
        ("sk-one\nsk-two", "not valid in an HTTP header"),
        ("sk-\u201cquoted\u201d", "not valid in an HTTP header"),
        ("abc", "fewer than 8"),
        ("sk-1234", "fewer than 8"),
    ],
)
def test_a_key_too_short_to_be_scrubbed_is_refused(key: str, reason: str, monkeypatch) -> None:
    """A missing key and one that no header can hold are refused, too."""
    monkeypatch.setenv("MY_JUDGE", key)
    with pytest.raises(ValueError, match=rf"judge\.api_key_env names MY_JUDGE.*{reason}") as error:
        auth_header("MY_JUDGE")
    assert not key or key not in str(error.value)


@pytest.mark.parametrize("key", ["EMPTY", "none", "dummy", "-", "sk-no-key", "not-needed"])
def test_placeholder_keys_are_accepted_and_not_scrubbed(key: str, monkeypatch) -> None:
    monkeypatch.setenv("MY_JUDGE", key)
    assert auth_header("MY_JUDGE") == {"Authorization": f"Bearer {key}"}
    assert scrub(f"said {key}") == f"said {key}"


def test_loopback_addresses_are_recognised() -> None:
    assert is_loopback("http://127.0.0.1:1/v1") and is_loopback("http://localhost:1/v1")
    assert is_loopback("http://[::1]:1/v1") and not is_loopback("http://10.0.0.7:1/v1")
