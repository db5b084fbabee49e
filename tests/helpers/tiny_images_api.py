"""An images API on loopback, with seeds or without, that refuses, ignores or fails on request."""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
from collections.abc import Sequence
from email.parser import BytesParser
from hashlib import blake2b
from typing import Any

from PIL import Image
from tiny_faulty_judge import MODEL, Fault, FaultyJudge

from rl.api.plugin import Resources
from rl.api.types import RenderJob, Sample
from rl.files import png_bytes
from rl.renderers.images_api import Config, ImagesApi

SIDE_PX = 16
REFUSED = "violence"
"""A word in prompts that the server refuses."""
BLOCKED = '{"error": {"message": "rejected by the safety system", "code": "moderation_blocked"}}'


class ImagesServer(FaultyJudge):
    """Draws noise that depends on the prompt, the seed and the source pictures."""

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        always: Fault | None = None,
        ignored: Sequence[str] = (),
        refused_fields: Sequence[str] = (),
        noisy: bool = False,
        most_stall_s: float = 0.0,
    ) -> None:
        """`always`: the answer to everything, after `faults`. `ignored`: of 'prompt', 'seed' and
        'images'. `noisy`: another picture each time. `most_stall_s`: of the random pauses before
        the answers."""
        self.always, self.ignored, self.refused_fields = always, ignored, refused_fields
        self.most_stall_s = most_stall_s
        self._numbers = itertools.count() if noisy else itertools.repeat(0)
        super().__init__(faults)
        self.models = always

    def picture(self, prompt: str, seed: Any, images: Sequence[bytes]) -> Image.Image:
        """The picture of a request, which a test can compute as well. `images`: PNGs."""
        inputs = {"prompt": prompt, "seed": str(seed), "images": [image.hex() for image in images]}
        kept = [next(self._numbers), *(inputs[name] for name in inputs if name not in self.ignored)]
        pixels = random.Random(blake2b(json.dumps(kept).encode()).digest())
        return Image.frombytes("RGB", (SIDE_PX, SIDE_PX), pixels.randbytes(3 * SIDE_PX**2))

    def answer_to(self, fields: dict[str, Any], images: Sequence[bytes]) -> Fault:
        """What is answered unless a fault is scripted."""
        if refused := [name for name in self.refused_fields if name in fields]:
            return Fault(400, body=f"Unknown parameter: '{refused[0]}'.")
        if REFUSED in fields["prompt"]:
            return Fault(400, body=BLOCKED)
        picture = self.picture(fields["prompt"], fields.get("seed"), images)
        return Fault(body=body_of(picture), stall_s=random.uniform(0, self.most_stall_s))


class _Handler(FaultyJudge.handler):  # type: ignore[name-defined, misc]
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        fields, images = form_of(self.headers["Content-Type"], body)
        server = self.server.judge
        server.after = server.always or server.answer_to(fields, images)
        noted = {"path": self.path, "num_images": len(images), **fields}
        self._play(server.begin(json.dumps(noted).encode(), dict(self.headers)))
        server.end()


ImagesServer.handler = _Handler


def form_of(content_type: str, body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """(fields, source pictures) of JSON or of a form."""
    if content_type == "application/json":
        return json.loads(body), []
    message: Any = BytesParser().parsebytes(f"Content-Type: {content_type}\n\n".encode() + body)
    parts = [
        (part.get_param("name", header="content-disposition"), part.get_payload(decode=True))
        for part in message.get_payload()
    ]
    fields = {name: content.decode() for name, content in parts if name != "image[]"}
    return fields, [content for name, content in parts if name == "image[]"]


def body_of(picture: Image.Image, form: str = "PNG", num_bytes: int | None = None) -> str:
    """An answer with a picture in this format, of which only the first bytes are sent."""
    file = io.BytesIO()
    picture.save(file, form)
    text = base64.encodebytes(file.getvalue()[:num_bytes]).decode()  # with line ends
    usage = {"input_tokens": 7, "output_tokens": 100}
    return json.dumps({"data": [{"b64_json": text}], "usage": usage})


def renderer_of(*servers: ImagesServer | str, is_first: bool = False, **changes: Any) -> ImagesApi:
    """A renderer of these servers (or URLs), with short pauses."""
    bases = [server if isinstance(server, str) else server.api_base for server in servers]
    quick: dict[str, Any] = {"timeout_s": 5.0, "max_outage_s": 2.0}
    config = Config(**{**quick, "api_base": bases, "model": MODEL, **changes})
    return ImagesApi(config, Resources(None, "cpu", is_first=is_first))


def job_of(words: str, number: int = 0, num_sources: int = 0, wish: str = "a wish") -> RenderJob:
    """A job of sample `number`."""
    sources = [Image.new("RGB", (24, 20 + i), (40 * i, number, 99)) for i in range(num_sources)]
    return RenderJob(Sample(f"s{number}", wish, tuple(sources)), words, noise_seed=5)


def expected(server: ImagesServer, job: RenderJob) -> Image.Image:
    """The picture of a job, computed without HTTP."""
    return server.picture(job.payload, job.noise_seed, [png_bytes(s) for s in job.sample.sources])
