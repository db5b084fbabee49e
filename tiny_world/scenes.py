"""Scenes of two or three coloured shapes, edit instructions, and the descriptions that fulfil them.

To understand an instruction ("paint the square the color of grass"), the policy must read the
picture and know that grass is green. It should write the description ("turn the red square
green."), which is all that the image editor follows.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

IMAGE_SIDE_PX = 64
CELL_SIDE_PX = 32  # a cell is a quarter of the picture and has at most one shape
JITTER_PX = 2  # largest distance of a shape's centre from the centre of its quarter

RGB = {
    "red": (205, 25, 40),
    "green": (40, 170, 60),
    "blue": (40, 80, 220),
    "yellow": (250, 235, 60),
    "purple": (130, 30, 170),
    "orange": (245, 125, 20),
    "white": (250, 250, 250),
    "black": (15, 15, 15),
}
COLOURS = tuple(RGB)
SHAPES = ("circle", "square", "triangle")
BACKGROUNDS_RGB = ((150, 150, 150), (175, 165, 150), (140, 155, 170))
COLOUR_OF_NOUN = {
    "grass": "green",
    "sky": "blue",
    "lemon": "yellow",
    "cherry": "red",
    "plum": "purple",
    "pumpkin": "orange",
    "snow": "white",
    "coal": "black",
}
KIND_SHARES = {"noun": 0.5, "match": 0.25, "erase": 0.25}


@dataclass(frozen=True)
class Shape:
    """One shape of a scene."""

    shape: str
    """One of SHAPES, unique in its scene."""
    colour: str
    """One of COLOURS."""
    cell: tuple[int, int]
    """(row, column) of its quarter, each 0 or 1."""
    offset_px: tuple[int, int]
    """(dy, dx) of its centre from the centre of that quarter."""


@dataclass(frozen=True)
class Scene:
    """The content of a picture."""

    background: int
    """Index into BACKGROUNDS_RGB."""
    shapes: tuple[Shape, ...]

    def find(self, shape: str) -> Shape:
        """The shape of that name; raises KeyError if the scene has none."""
        for candidate in self.shapes:
            if candidate.shape == shape:
                return candidate
        raise KeyError(shape)


@dataclass(frozen=True)
class Op:
    """One edit: the shape gets a new colour or is removed."""

    shape: str
    paint: str | None
    """One of COLOURS; None removes the shape."""


@dataclass(frozen=True)
class Task:
    """An instruction and the edit that fulfils it."""

    instruction: str
    op: Op
    kind: str
    """'noun' needs world knowledge, 'match' two look-ups in the picture, 'erase' one, 'borrow' one
    look-up in the picture and one in a second picture."""


def make_scene(rng: random.Random) -> Scene:
    """Two or three shapes, all different in form and in colour."""
    num_shapes = rng.choice((2, 3, 3))
    shapes = rng.sample(SHAPES, num_shapes)
    colours = rng.sample(COLOURS, num_shapes)
    cells = rng.sample([(0, 0), (0, 1), (1, 0), (1, 1)], num_shapes)
    background = rng.randrange(len(BACKGROUNDS_RGB))

    def jitter() -> int:
        return rng.randint(-JITTER_PX, JITTER_PX)

    placed = zip(shapes, colours, cells, strict=True)
    return Scene(background, tuple(Shape(s, c, q, (jitter(), jitter())) for s, c, q in placed))


def make_instruction(rng: random.Random, scene: Scene) -> Task:
    """An instruction about one shape of the scene; the right edit always changes the picture."""
    kind = rng.choices(list(KIND_SHARES), list(KIND_SHARES.values()))[0]
    target = rng.choice(scene.shapes)
    if kind == "noun":
        noun = rng.choice([n for n, c in COLOUR_OF_NOUN.items() if c != target.colour])
        text = f"paint the {target.shape} the color of {noun}"
        return Task(text, Op(target.shape, COLOUR_OF_NOUN[noun]), kind)
    if kind == "match":
        model = rng.choice([s for s in scene.shapes if s is not target])
        text = f"make the {target.shape} match the {model.shape}"
        return Task(text, Op(target.shape, model.colour), kind)
    return Task(f"erase the {target.shape}", Op(target.shape, None), kind)


def make_borrowing(rng: random.Random, scene: Scene, lender: Scene) -> Task:
    """An instruction about one shape of the scene that takes its colour from a second picture."""
    choices = [(s, m) for s in scene.shapes for m in lender.shapes if m.colour != s.colour]
    target, model = rng.choice(choices)
    text = f"give the {target.shape} the color of the {model.shape} in picture 2"
    return Task(text, Op(target.shape, model.colour), "borrow")


class MissingShapeError(ValueError):
    """An instruction names something that is not in the picture."""


def read_instruction(instruction: str, scene: Scene, lenders: Sequence[Scene] = ()) -> Op:
    """The edit that an instruction asks for; raises ValueError if neither `make_instruction` nor
    `make_borrowing` can have written it, MissingShapeError if they cannot have written it for this
    scene. `lenders`: the second picture and those after it."""
    try:
        match instruction.strip().split():
            case ["paint", "the", shape, "the", "color", "of", noun]:
                return Op(scene.find(shape).shape, COLOUR_OF_NOUN[noun])
            case ["make", "the", shape, "match", "the", model]:
                return Op(scene.find(shape).shape, scene.find(model).colour)
            case ["erase", "the", shape]:
                return Op(scene.find(shape).shape, None)
            case ["give", "the", shape, "the", "color", "of", "the", model, "in", "picture", "2"]:
                if not lenders:
                    raise ValueError(f"{instruction!r} speaks of picture 2, and there is one")
                return Op(scene.find(shape).shape, lenders[0].find(model).colour)
    except KeyError as missing:
        raise MissingShapeError(f"{instruction!r} names {missing}, which is not there") from missing
    raise ValueError(
        f"{instruction!r} is none of 'paint the <shape> the color of <noun>', "
        "'make the <shape> match the <shape>', 'erase the <shape>', 'give the <shape> the color of "
        "the <shape> in picture 2'"
    )


def apply(scene: Scene, op: Op) -> Scene:
    """The scene after one edit; an edit of an absent shape changes nothing."""
    if op.paint is None:
        return replace(scene, shapes=tuple(s for s in scene.shapes if s.shape != op.shape))
    painted = (replace(s, colour=op.paint) if s.shape == op.shape else s for s in scene.shapes)
    return replace(scene, shapes=tuple(painted))


def clause(colour: str, shape: str, paint: str | None) -> str:
    """One sentence of a description, which the image editor understands."""
    return (
        f"remove the {colour} {shape}." if paint is None else f"turn the {colour} {shape} {paint}."
    )


def describe(ops: Op | Sequence[Op], scene: Scene) -> str:
    """The description that makes the editor do these edits to this scene."""
    ops = [ops] if isinstance(ops, Op) else ops
    return " ".join(clause(scene.find(op.shape).colour, op.shape, op.paint) for op in ops)


def draw(scene: Scene) -> Image.Image:
    """The picture of a scene, RGB, 64x64, edges antialiased."""
    return Image.fromarray(draw_array(scene))


def draw_array(scene: Scene) -> np.ndarray:
    """The picture of a scene as [64, 64, 3] uint8."""
    pixels = np.empty((IMAGE_SIDE_PX, IMAGE_SIDE_PX, 3), np.float32)
    pixels[:] = BACKGROUNDS_RGB[scene.background]
    for shape in scene.shapes:
        rows, columns = cell_slices(shape.cell)
        mask = cell_mask(shape.shape, shape.offset_px)[..., None]
        colour = np.array(RGB[shape.colour], np.float32)
        pixels[rows, columns] = pixels[rows, columns] * (1 - mask) + mask * colour
    return np.round(pixels).astype(np.uint8)


def cell_slices(cell: tuple[int, int]) -> tuple[slice, slice]:
    """(rows, columns) of a quarter of the picture."""
    row, column = (index * CELL_SIDE_PX for index in cell)
    return slice(row, row + CELL_SIDE_PX), slice(column, column + CELL_SIDE_PX)


@functools.cache
def cell_mask(shape: str, offset_px: tuple[int, int]) -> np.ndarray:
    """The share of each pixel of the quarter that the shape covers: [32, 32] float32 in 0..1."""
    supersample = 4
    num = CELL_SIDE_PX * supersample
    grid_px = (np.arange(num) + 0.5) / supersample - CELL_SIDE_PX / 2
    y, x = grid_px[:, None] - offset_px[0], grid_px[None, :] - offset_px[1]
    if shape == "circle":
        inside = x * x + y * y <= 11.0**2
    elif shape == "square":
        inside = (np.abs(x) <= 10) & (np.abs(y) <= 10)
    else:  # triangle, point up: 20 px high, 24 px wide
        inside = (np.abs(y) <= 10) & (np.abs(x) <= (y + 10) * 0.6)
    blocks = inside.reshape(CELL_SIDE_PX, supersample, CELL_SIDE_PX, supersample)
    return blocks.mean((1, 3)).astype(np.float32)
