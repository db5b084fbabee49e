"""Every form that judge.api_base may take, and what is said about the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.system.judge_endpoint import is_loopback, resolve_api_base


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
    ],
)
def test_urls(given: str, resolved: str) -> None:
    assert resolve_api_base(given) == resolved


@pytest.mark.parametrize(
    ("held", "resolved"),
    [
        ("gpu-node-7\n", "http://gpu-node-7:4877/v1"),
        ("gpu-node-7:9000", "http://gpu-node-7:9000/v1"),
        ("http://gpu-node-7:9000/v1\nsecond line\n", "http://gpu-node-7:9000/v1"),
    ],
)
def test_files(held: str, resolved: str, tmp_path: Path) -> None:
    path = tmp_path / "judge_host"
    path.write_text(held)
    assert resolve_api_base(str(path)) == resolved


@pytest.mark.parametrize("given", ["", "none", "None", "  "])
def test_no_judge_names_the_remedy(given: str) -> None:
    with pytest.raises(ValueError, match=r"judge\.api_base is empty.*'embedded'"):
        resolve_api_base(given)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("/no/such/file", "nor a file that exists"),
        ("judge", "nor a file that exists"),
        ("ftp://judge/v1", "not an http"),
        ("http://", "not an http"),
    ],
)
def test_what_is_no_endpoint(given: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        resolve_api_base(given)


@pytest.mark.parametrize("given", ["https://me:hunter2@host/v1", "https://host/v1?key=hunter2"])
def test_keys_in_the_url_are_refused_and_not_repeated(given: str) -> None:
    with pytest.raises(ValueError, match=r"judge\.api_key_env") as error:
        resolve_api_base(given)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(("held", "reason"), [("\n", "is empty"), ("b@d!", "neither")])
def test_files_that_hold_no_host(held: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "judge_host"
    path.write_text(held)
    with pytest.raises(ValueError, match=reason):
        resolve_api_base(str(path))


def test_loopback_is_known() -> None:
    assert is_loopback("http://127.0.0.1:1/v1") and is_loopback("http://localhost:1/v1")
    assert is_loopback("http://[::1]:1/v1") and not is_loopback("http://10.0.0.7:1/v1")
