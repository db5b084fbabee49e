"""The tiny FLUX.2-klein as an OpenAI-compatible images API, for runs with `images_api`.

Answers `/v1/models` and `/v1/images/edits` (a form, or JSON with data URLs) on loopback. Equal
words, pictures and seeds give equal pictures. Start it before the run, whose `renderer` has the
same port and model: `python -m tiny_world.images_server <port> <model>`.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import threading
from collections.abc import Iterator
from email.parser import BytesParser
from email.policy import HTTP
from pathlib import Path
from typing import Any

from PIL import Image

from tiny_world.judge_server import JudgeHandler, JudgeServer, picture_at, read_png
from tiny_world.scenes import IMAGE_SIDE_PX

WEIGHTS = Path(__file__).parent / "weights/klein"
SIZE = f"{IMAGE_SIDE_PX}x{IMAGE_SIDE_PX}"
PICTURES = ("image", "image[]")
"""Names of the files of a form."""
TEXT_TOKENS = 32
"""Texts are padded to it, and the states of the padding condition the transformer, too."""
OUT_LAYERS = (0, 1, 2)
"""The text encoder's layers whose states condition the transformer, side by side; 0 are the
embeddings."""
CALL = {
    "num_inference_steps": 4,
    "guidance_scale": 1.0,
    "max_sequence_length": TEXT_TOKENS,
    "text_encoder_out_layers": OUT_LAYERS,
}
"""Keywords of each call of the pipeline; the weights were trained for the last two."""


class ImagesHandler(JudgeHandler):
    """Handles the requests of one connection."""

    endpoint = "/v1/images/edits"

    def complete(self, body: bytes) -> None:
        server = self.server.judge
        assert isinstance(server, ImagesServer)
        try:
            fields, sources = read_request(self.headers["Content-Type"], body)
            if fields["model"] != server.model:
                return self.fail(404, f"model {fields['model']!r} is not served here")
            drawn = server.draw(fields, sources)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return self.fail(400, f"{type(error).__name__}: {error}")
        return self.send(200, {"data": [{"b64_json": _base64_png(picture)} for picture in drawn]})


class ImagesServer(JudgeServer):
    """Serves on loopback, in a daemon thread, until `close()`."""

    handler = ImagesHandler

    def __init__(self, model: str, port: int = 0) -> None:
        """As the judge's, with `renderer.model`."""
        import torch
        from diffusers import Flux2KleinPipeline

        torch.set_num_threads(1)
        self.pipeline = Flux2KleinPipeline.from_pretrained(WEIGHTS, torch_dtype=torch.float32)
        self.pipeline.set_progress_bar_config(disable=True)
        self._lock = threading.Lock()  # a pipeline draws one call at a time
        super().__init__(model, port)

    def draw(self, fields: dict[str, Any], sources: list[Image.Image]) -> list[Image.Image]:
        """`n` edits of the pictures by `prompt`, with the seeds `seed`, `seed + 1`, ..."""
        import torch

        if fields.get("size", SIZE) != SIZE:
            raise ValueError(f"size {fields['size']}: this editor draws {SIZE}")
        first, drawn = int(fields.get("seed", 0)), []
        for seed in range(first, first + int(fields.get("n", 1))):
            noise = torch.Generator().manual_seed(seed)
            with self._lock:
                call = {"image": list(sources), "prompt": fields["prompt"], **CALL}
                drawn += self.pipeline(generator=noise, **call).images
        return drawn


def read_request(content_type: str, body: bytes) -> tuple[dict[str, Any], list[Image.Image]]:
    """The fields of a request and its source pictures, from JSON or a form. Raises ValueError if a
    picture cannot be read."""
    if content_type.startswith("application/json"):
        fields = json.loads(body)
        given = fields.pop("images", None) or fields.pop("image")
        urls = given if isinstance(given, list) else [given]
        return fields, [picture_at(u["image_url"] if isinstance(u, dict) else u) for u in urls]
    parts = list(_form(content_type, body))
    sources = [read_png(content) for name, content in parts if name in PICTURES]
    return {name: content.decode() for name, content in parts if name not in PICTURES}, sources


def _form(content_type: str, body: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each part of a multipart form."""
    head = f"Content-Type: {content_type}\r\n\r\n".encode()
    for part in BytesParser(policy=HTTP).parsebytes(head + body).iter_parts():
        content = part.get_payload(decode=True)
        assert isinstance(content, bytes)
        yield str(part.get_param("name", header="content-disposition")), content


def _base64_png(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def main() -> None:
    """Serve until a signal ends this process."""
    port, model = sys.argv[1:]
    with ImagesServer(model, int(port)):
        threading.Event().wait()


if __name__ == "__main__":
    main()
