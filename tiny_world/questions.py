"""Questions about small pictures with checkable answers: how many, what colour, what sum."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from tiny_world.scenes import (
    BACKGROUNDS_RGB,
    COLOURS,
    IMAGE_SIDE_PX,
    JITTER_PX,
    RGB,
    SHAPES,
    Scene,
    Shape,
    cell_slices,
    make_scene,
)
from tiny_world.scenes import draw_array as draw_scene

KINDS = ("count", "colour", "sum")
SYSTEM_PROMPT = "Write your thoughts in <think></think>, then the answer in <answer></answer>."
"""The policy was trained with it; a run's `policy.system_prompt` has to be the same."""
COUNT_QUESTION = "how many shapes are there?"
SUM_QUESTION = "what is the sum of the two numbers?"
GLYPHS = {  # 3 x 5 dots, row by row
    0: "111 101 101 101 111",
    1: "010 110 010 010 111",
    2: "111 001 111 100 111",
    3: "111 001 111 001 111",
    4: "101 101 111 001 001",
    5: "111 100 111 001 111",
}
DIGITS = tuple(GLYPHS)
DOT_PX = 4
INKS = ("white", "black")


@dataclass(frozen=True)
class Numbers:
    """A picture of two one-digit numbers side by side."""

    background: int
    """Index into BACKGROUNDS_RGB."""
    ink: str
    """One of INKS."""
    digits: tuple[int, int]
    """Left and right, each of DIGITS."""
    row: int
    """Upper (0) or lower (1) half of the picture."""
    offsets_px: tuple[tuple[int, int], tuple[int, int]]
    """(dy, dx) of each from the centre of its quarter."""


@dataclass(frozen=True)
class Question:
    """A question about a picture, with the right answer and a right thought."""

    picture: Scene | Numbers
    text: str
    answer: str
    thought: str
    """A right thought, from which the answer follows."""
    kind: str
    """One of KINDS."""


def make_question(rng: random.Random, kind: str | None = None) -> Question:
    """A random question of `kind`, by default of a random one of KINDS."""
    kind = kind or rng.choice(KINDS)
    if kind == "count":
        scene = _crowd(rng)
        answer = str(len(scene.shapes))
        return Question(scene, COUNT_QUESTION, answer, listing(scene.shapes), kind)
    if kind == "colour":
        scene = make_scene(rng)
        shape = rng.choice(scene.shapes)
        text = f"what color is the {shape.shape}?"
        return Question(scene, text, shape.colour, f"the {shape.shape} is {shape.colour}.", kind)
    numbers = _two_numbers(rng)
    left, right = numbers.digits
    return Question(numbers, SUM_QUESTION, str(left + right), f"{left} plus {right}.", kind)


def listing(shapes: tuple[Shape, ...]) -> str:
    """'circle, square, square.', in reading order."""
    return ", ".join(s.shape for s in sorted(shapes, key=lambda s: s.cell)) + "."


def written(thought: str, answer: str) -> str:
    """A completion in the form that the rewards `accuracy` and `format` read."""
    return f"<think>{thought}</think><answer>{answer}</answer>"


def draw_array(picture: Scene | Numbers) -> np.ndarray:
    """The picture as [64, 64, 3] uint8."""
    if isinstance(picture, Scene):
        return draw_scene(picture)
    pixels = np.empty((IMAGE_SIDE_PX, IMAGE_SIDE_PX, 3), np.uint8)
    pixels[:] = BACKGROUNDS_RGB[picture.background]
    for column, (digit, offset_px) in enumerate(
        zip(picture.digits, picture.offsets_px, strict=True)
    ):
        rows, columns = cell_slices((picture.row, column))
        pixels[rows, columns][_glyph_mask(digit, offset_px)] = RGB[picture.ink]
    return pixels


def _crowd(rng: random.Random) -> Scene:
    """One to four shapes of different colours and any forms."""
    cells = rng.sample([(0, 0), (0, 1), (1, 0), (1, 1)], rng.randint(1, 4))
    colours = rng.sample(COLOURS, len(cells))
    shapes = tuple(
        Shape(rng.choice(SHAPES), colour, cell, _jitter(rng))
        for colour, cell in zip(colours, cells, strict=True)
    )
    return Scene(rng.randrange(len(BACKGROUNDS_RGB)), shapes)


def _two_numbers(rng: random.Random) -> Numbers:
    return Numbers(
        background=rng.randrange(len(BACKGROUNDS_RGB)),
        ink=rng.choice(INKS),
        digits=(rng.choice(DIGITS), rng.choice(DIGITS)),
        row=rng.randrange(2),
        offsets_px=(_jitter(rng), _jitter(rng)),
    )


def _jitter(rng: random.Random) -> tuple[int, int]:
    return rng.randint(-JITTER_PX, JITTER_PX), rng.randint(-JITTER_PX, JITTER_PX)


def _glyph_mask(digit: int, offset_px: tuple[int, int]) -> np.ndarray:
    """The pixels of a digit in its quarter: [32, 32] bool."""
    dots = np.array([[dot == "1" for dot in row] for row in GLYPHS[digit].split()])
    ink = np.kron(dots, np.ones((DOT_PX, DOT_PX), bool))
    height, width = ink.shape
    mask = np.zeros((IMAGE_SIDE_PX // 2, IMAGE_SIDE_PX // 2), bool)
    up = (len(mask) - height) // 2 + offset_px[0]
    left = (len(mask) - width) // 2 + offset_px[1]
    mask[up : up + height, left : left + width] = ink
    return mask
