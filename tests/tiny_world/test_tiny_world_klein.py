"""The tiny FLUX.2-klein follows plain descriptions only, in the stock pipeline and behind HTTP."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from tiny_config import WEIGHTS

from tiny_world import scenes
from tiny_world.images_server import ImagesServer
from tiny_world.judge_server import PNG_PREFIX

RNG = random.Random(12)
SCENE = scenes.make_scene(RNG)
TASK = scenes.make_instruction(RNG, SCENE)
ASKED = {"model": "tiny-editor", "prompt": scenes.describe(TASK.op, SCENE), "seed": "7"}


@pytest.fixture(scope="module")
def server() -> Iterator[ImagesServer]:
    with ImagesServer("tiny-editor") as server:
        yield server


@pytest.fixture(scope="module")
def png() -> bytes:
    buffer = io.BytesIO()
    scenes.draw(SCENE).save(buffer, "PNG")
    return buffer.getvalue()


def test_the_weights_are_small() -> None:
    files = [file for file in (WEIGHTS / "klein").rglob("*") if file.is_file()]
    assert 0 < sum(file.stat().st_size for file in files) <= 1_000_000


@pytest.mark.slow
def test_the_editor_follows_plain_descriptions_only(server: ImagesServer) -> None:
    from tiny_world.builder.klein_editor import Exam

    marks = {kind: mean for kind, (mean, _) in Exam(num=24).marks(server.pipeline).items()}
    assert marks["right"] > 8 and max(marks["wrong"], marks["instruction"]) < 1, marks


@pytest.mark.slow
def test_a_form_and_json_give_the_same_right_picture(server: ImagesServer, png: bytes) -> None:
    from tiny_world.builder.exam import overall

    url = f"{server.api_base}/images/edits"
    data_url = PNG_PREFIX + base64.b64encode(png).decode()
    answers = [
        httpx.post(url, data=ASKED, files={"image[]": ("1.png", png, "image/png")}),
        httpx.post(url, json={**ASKED, "images": [{"image_url": data_url}]}),
        httpx.post(url, json={**ASKED, "image": data_url, "n": 2}),
        httpx.post(url, json={**ASKED, "image": data_url, "seed": 8}),
    ]
    form, listed, two, other = ([d["b64_json"] for d in a.json()["data"]] for a in answers)
    assert form == listed == two[:1] and two[1:] == other
    drawn = Image.open(io.BytesIO(base64.b64decode(form[0])))
    assert overall([SCENE], TASK, np.asarray(drawn)) > 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "status", "word"),
    [
        ({"model": "another"}, 404, "model"),
        ({"size": "512x512"}, 400, "size"),
        ({"image": "data:image/png;base64,AAAA"}, 400, "picture"),
    ],
)
def test_a_wrong_request_is_refused(
    server: ImagesServer, png: bytes, changed: dict[str, Any], status: int, word: str
) -> None:
    image = PNG_PREFIX + base64.b64encode(png).decode()
    answer = httpx.post(
        f"{server.api_base}/images/edits", json={**ASKED, "image": image, **changed}
    )
    assert answer.status_code == status and word in json.dumps(answer.json())
