"""A judge with an untrusted TLS certificate is reported at once, with the remedy."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_faulty_judge import MODEL, FaultyJudge, with_client
from tiny_messages import raising

from rl.judge.client import JudgeUnreachableError
from tiny_world.judge_server import JudgeServer

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the key")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    file = tmp_path / "own.pem"
    options = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    output = ["-keyout", str(tmp_path / "key.pem"), "-out", str(file)]
    subprocess.run(["openssl", *options.split(), names, *output], check=True, capture_output=True)
    return file


@pytest.fixture
def judge(certificate: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.parent / "key.pem")
    with JudgeServer(MODEL) as server:
        server._http.socket = context.wrap_socket(server._http.socket, server_side=True)
        yield server.api_base.replace("http:", "https:")


def health(api_base: str) -> Any:
    return with_client(api_base, lambda client: client.check_health(wait_s=60.0))[0]


@pytest.mark.slow
def test_an_untrusted_certificate_is_reported(judge: str, certificate: Path, monkeypatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    started_s = time.monotonic()
    parts = f"{judge}  ... (transport: ConnectError  ... self-signed ... SSL_CERT_FILE="
    with raising(JudgeUnreachableError, parts):
        health(judge)
    assert time.monotonic() - started_s < 30, "waiting would not help"
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert health(judge) == [judge]
    with FaultyJudge() as plain:
        wrong_host = judge.replace("127.0.0.1", "127.1")
        for api_base in (wrong_host, plain.api_base.replace("http:", "https:")):
            parts = "judge.api_base ... host name ... http:// URL"
            with raising(JudgeUnreachableError, parts):
                health(api_base)
