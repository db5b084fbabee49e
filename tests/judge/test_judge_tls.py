"""A judge with an untrusted TLS certificate is reported at once, with the remedy."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tiny_faulty_judge import MODEL, FaultyJudge, with_client
from tiny_messages import holds

from rl.judge.client import JudgeUnreachableError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the key")


class Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": MODEL}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


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
    server = HTTPServer(("127.0.0.1", 0), Models)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def health(api_base: str) -> list[str]:
    alive: list[str] = with_client(api_base, lambda client: client.check_health(wait_s=60.0))[0]
    return alive


@pytest.mark.slow
def test_an_untrusted_certificate_is_reported(judge: str, certificate: Path, monkeypatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    started_s = time.monotonic()
    with pytest.raises(JudgeUnreachableError) as refused:
        health(judge)
    assert time.monotonic() - started_s < 30, "waiting would not help"
    message = str(refused.value)
    assert message.startswith(f"{judge} ") and "(transport: ConnectError " in message
    assert "self-signed certificate" in message and "SSL_CERT_FILE=" in message
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert health(judge) == [judge]
    with FaultyJudge() as plain:
        wrong_host = judge.replace("127.0.0.1", "127.1")
        without_tls = plain.api_base.replace("http:", "https:")
        for api_base in (wrong_host, without_tls):
            with pytest.raises(JudgeUnreachableError) as refused:
                health(api_base)
            assert holds(refused.value, "judge.api_base ... host name ... http:// URL")
