"""Every form that judge.api_base may take, and what is said about the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.judge.endpoint import auth_header, is_loopback, resolve_api_base, resolve_api_bases
from rl.text.scrub import scrub


@pytest.mark.parametrize(
    ("given", "resolved"),
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
def test_urls(given: str, resolved: str) -> None:
    assert resolve_api_base(given) == resolved


A, B = "http://a:4877/v1", "https://b.example/v1"


@pytest.mark.parametrize(
    "given",
    [
        ["a:4877", "https://b.example"],
        "http://a:4877, https://b.example/v1/",
        ["a:4877,https://b.example", "http://a:4877/v1"],
        "FILE",
        ["FILE"],
        "a:4877,FILE",
    ],
)
def test_several_places(given: str | list[str], tmp_path: Path) -> None:
    file = tmp_path / "judges"
    file.write_text("a:4877 the first\n\nsome words\nhttps://b.example\na:4877\n")
    words = [given] if isinstance(given, str) else given
    named = [word.replace("FILE", str(file)) for word in words]
    assert resolve_api_bases(named[0] if isinstance(given, str) else named) == (A, B)
    with pytest.raises(ValueError, match=r"2 places.* drop start_command"):
        resolve_api_base(named[0] if isinstance(given, str) else named)


def test_one_wrong_place_of_several_is_named(tmp_path: Path) -> None:
    file = tmp_path / "judges"
    file.write_text("http://a:4877\nb@d!\n")  # pragma: allowlist secret
    for given, wrong in (["a:4877", "judge"], "'judge' is neither"), (str(file), "'b@d!'"):
        with pytest.raises(ValueError, match=r"judge\.api_base.*") as error:
            resolve_api_bases(given)
        assert wrong in str(error.value)


@pytest.mark.parametrize("given", ["", "none", "None", "  ", ["", " "]])
def test_no_judge_names_the_remedy(given: str | list[str]) -> None:
    with pytest.raises(ValueError, match=r"judge\.api_base is empty.*judge\.start_command"):
        resolve_api_base(given)


@pytest.mark.parametrize(
    ("given", "reason"),
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
    ],
)
def test_what_is_no_endpoint(given: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        resolve_api_base(given)
    assert "judge.api_base" in str(error.value)
    str(error.value).encode()


@pytest.mark.parametrize(
    "given", ["https://me:hunter2@host/v1", "https://host/v1?key=hunter2", "http://me:hunter2@[::1"]
)
def test_keys_in_the_url_are_refused_and_not_repeated(given: str) -> None:
    with pytest.raises(ValueError, match=r"judge\.api_key_env") as error:
        resolve_api_base(given)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("held", "reason"),
    [("\n", "is empty"), ("b@d!", "neither"), ("gpu-7", "neither"), ("x" * 9999, "longer")],
)
def test_files_that_hold_no_host(held: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "judge_host"
    path.write_text(held)
    with pytest.raises(ValueError, match=reason):
        resolve_api_base(str(path))


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "export MY_JUDGE="),
        ("sk-one\nsk-two", "whose value no HTTP header takes"),
        ("sk-\u201cquoted\u201d", "whose value no HTTP header takes"),
        ("abc", "fewer than 8"),
        ("sk-1234", "fewer than 8"),
    ],
)
def test_a_key_too_short_to_be_scrubbed_is_refused(key: str, reason: str, monkeypatch) -> None:
    """And one that is missing, or that no header takes."""
    monkeypatch.setenv("MY_JUDGE", key)
    with pytest.raises(ValueError, match=rf"judge\.api_key_env names MY_JUDGE.*{reason}") as error:
        auth_header("MY_JUDGE")
    assert not key or key not in str(error.value)


@pytest.mark.parametrize("key", ["EMPTY", "none", "dummy", "-", "sk-no-key", "not-needed"])
def test_what_servers_without_keys_are_given_is_no_key(key: str, monkeypatch) -> None:
    monkeypatch.setenv("MY_JUDGE", key)
    assert auth_header("MY_JUDGE") == {"Authorization": f"Bearer {key}"}
    assert scrub(f"said {key}") == f"said {key}"


def test_loopback_is_known() -> None:
    assert is_loopback("http://127.0.0.1:1/v1") and is_loopback("http://localhost:1/v1")
    assert is_loopback("http://[::1]:1/v1") and not is_loopback("http://10.0.0.7:1/v1")
