"""The tiny world's judge as an OpenAI-compatible HTTP server; tiny runs use the real client.

Answers `/v1/models` and `/v1/chat/completions` on loopback: the shipped prompts of `viescore`,
`edit_quality`, `ground_score` and `viescore_t2i`, graded by `pixel_judge.py`. A config starts it
by `judge.start_command`: `python -m tiny_world.judge_server <file for its URL> <model>`.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from PIL import Image

from tiny_world.pixel_judge import grade_likeness, grade_perception, grade_semantics, grade_wish

MAX_BODY_BYTES = 64 * 2**20
PNG_PREFIX = "data:image/png;base64,"


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    judge: JudgeServer


class JudgeHandler(BaseHTTPRequestHandler):
    """Handles the requests of one connection."""

    server: _Http
    endpoint = "/v1/chat/completions"
    """Path whose requests `complete` answers."""
    protocol_version = "HTTP/1.1"
    # Small replies in two writes would each wait 40 ms for an acknowledgement.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            return self.fail(404, f"no such path: {self.path}")
        model = {"id": self.server.judge.model, "object": "model", "owned_by": "tiny-world"}
        return self.send(200, {"object": "list", "data": [model]})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > MAX_BODY_BYTES:
            self.close_connection = True
            return self.fail(413, f"{length} bytes; at most {MAX_BODY_BYTES}")
        body = self.rfile.read(length)
        if self.path != self.endpoint:
            return self.fail(404, f"no such path: {self.path}")
        return self.complete(body)

    def complete(self, body: bytes) -> None:
        judge = self.server.judge
        try:
            request = json.loads(body)
            if request["model"] != judge.model:
                return self.fail(404, f"model {request['model']!r} is not served here")
            reply = judge.answer(request["messages"][-1]["content"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return self.fail(400, f"{type(error).__name__}: {error}")
        return self.say(reply)

    def say(self, reply: str) -> None:
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        model = self.server.judge.model
        self.send(200, {"object": "chat.completion", "model": model, "choices": [choice]})

    def fail(self, status: int, message: str) -> None:
        self.send(status, {"error": {"message": message, "code": status}})

    def send(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing; the client logs what matters."""


class JudgeServer:
    """Serves on loopback, in a daemon thread, until `close()`."""

    handler = JudgeHandler

    def __init__(self, model: str, port: int = 0) -> None:
        """`model`: the served name, i.e. `judge.model`; any other name gives a 404. `port`: 0 = a
        free one."""
        self.model = model
        self._http = _Http(("127.0.0.1", port), self.handler)
        self._http.judge = self
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    @property
    def api_base(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    def answer(self, parts: list[dict[str, Any]]) -> str:
        """The judge's reply to a user message. Raises ValueError if it cannot grade the message."""
        urls = [part["image_url"]["url"] for part in parts if part.get("type") == "image_url"]
        images = [picture_at(url) for url in urls]
        text = "\n".join(str(part["text"]) for part in parts if part.get("type") == "text")
        wish, instruction = _marked(text, "prompt"), _marked(text, "instruction")
        match images:
            case [image]:
                if wish is not None:
                    return _reply({"score": [grade_wish(image, wish)]})
                return _reply({"score": grade_perception(image)})
            case [source, *lenders, edited] if instruction is not None:
                semantics = grade_semantics(source, edited, instruction, lenders)
                if '"alignment"' not in text:
                    return _reply({"score": semantics})
                quality = min(grade_perception(edited)) / 10
                return _reply({"alignment": min(semantics) / 10, "quality": quality})
            case [reference, edited]:
                return _reply({"score": grade_likeness(reference, edited)})
        raise ValueError(
            f"{len(images)} pictures in the message; this judge takes 1 or 2, and more with an "
            "<instruction>: the sources in their order, then the result"
        )

    def close(self) -> None:
        """Stop serving and free the port."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main(server: type[JudgeServer] = JudgeServer) -> None:
    """Serve until a signal ends this process."""
    url_file, model = sys.argv[1:]
    with server(model) as judge:
        Path(url_file).write_text(f"{judge.api_base}\n", encoding="utf-8")
        threading.Event().wait()


def _marked(text: str, tag: str) -> str | None:
    """The text between <tag> and </tag> in a shipped prompt; None if there is none."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    start, end = text.find(opening), text.rfind(closing)
    return text[start + len(opening) : end].strip() if 0 <= start < end else None


def picture_at(url: str) -> Image.Image:
    """The picture in a PNG data URL, RGB. Raises ValueError if there is none."""
    if not url.startswith(PNG_PREFIX):
        raise ValueError("pictures must come as PNG data URLs")
    try:
        return read_png(base64.b64decode(url[len(PNG_PREFIX) :], validate=True))
    except binascii.Error as error:
        raise ValueError(f"a picture that cannot be read ({error})") from None


def read_png(content: bytes) -> Image.Image:
    """The picture, RGB. Raises ValueError if it cannot be read."""
    try:
        return Image.open(io.BytesIO(content), formats=["PNG"]).convert("RGB")
    except (Image.DecompressionBombError, OSError) as error:
        raise ValueError(f"a picture that cannot be read ({error})") from None


def _reply(numbers: dict[str, Any]) -> str:
    rounded = {
        name: round(value, 3) if isinstance(value, float) else [round(float(v), 2) for v in value]
        for name, value in numbers.items()
    }
    return json.dumps({"reasoning": "read off the pixels", **rounded})


if __name__ == "__main__":
    main()
