"""Edits that take a colour from a second picture are written, parsed and graded."""

from __future__ import annotations

import base64
import random
from dataclasses import replace

import pytest
from PIL import Image

from rl.files import png_bytes
from tiny_world.judge_server import JudgeServer
from tiny_world.pixel_judge import grade_semantics
from tiny_world.scenes import (
    Scene,
    Shape,
    Task,
    apply,
    draw,
    make_borrowing,
    make_scene,
    read_instruction,
)

OTHER = {"red": "blue", "blue": "white", "white": "green"}
"""Colour -> another one; red for those that are left out."""


def examples(num: int, seed: int) -> list[tuple[Scene, Scene, Task]]:
    rng = random.Random(seed)
    pairs = [(make_scene(rng), make_scene(rng)) for _ in range(num)]
    return [(scene, lender, make_borrowing(rng, scene, lender)) for scene, lender in pairs]


def test_an_instruction_is_parsed_back_to_its_edit_of_the_first_picture():
    for scene, lender, task in examples(200, seed=1):
        assert read_instruction(task.instruction, scene, [lender]) == task.op
        assert apply(scene, task.op) != scene


def test_an_edit_without_a_second_picture_or_such_a_shape_is_refused():
    shapes = (Shape(name, "red", (0, 0), (0, 0)) for name in ("circle", "square"))
    circle, square = (Scene(0, (shape,)) for shape in shapes)
    text = "give the circle the color of the square in picture 2"
    for others, message in (([], "there is one"), ([circle], "not there")):
        with pytest.raises(ValueError, match=message):
            read_instruction(text, circle, others)
    assert read_instruction(text, circle, [square]).paint == "red"


@pytest.mark.slow
def test_the_judge_reads_the_colour_from_the_second_picture():
    for scene, lender, task in examples(60, seed=2):
        source, other, right = draw(scene), draw(lender), draw(apply(scene, task.op))
        assert min(grade_semantics(source, right, task.instruction, [other])) > 9.9
        assert grade_semantics(source, source, task.instruction, [other])[0] == 0
        assert min(grade_semantics(source, other, task.instruction, [other])) < 1
        shapes = [replace(s, colour=OTHER.get(s.colour, "red")) for s in lender.shapes]
        swapped = draw(replace(lender, shapes=tuple(shapes)))
        assert grade_semantics(source, right, task.instruction, [swapped])[0] <= 1


def test_the_server_expects_the_sources_in_order_and_then_the_result():
    scene, lender, task = examples(1, seed=4)[0]
    source, other, right = (_part(draw(each)) for each in (scene, lender, apply(scene, task.op)))
    text = {"type": "text", "text": f"<instruction>{task.instruction}</instruction>"}
    with JudgeServer("tiny-judge") as server:
        assert '"score": [10.0, 10.0]' in server.answer([text, source, other, right])
        with pytest.raises(ValueError, match="takes 1 or 2, and more with"):
            server.answer([source, other, right])
        try:
            assert '"score": [10.0, 10.0]' not in server.answer([text, other, source, right])
        except ValueError as error:
            assert "not there" in str(error)


def _part(picture: Image.Image) -> dict[str, object]:
    url = "data:image/png;base64," + base64.b64encode(png_bytes(picture)).decode()
    return {"type": "image_url", "image_url": {"url": url}}
