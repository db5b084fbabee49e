"""Users' prompts for one shape on grey, in words that the renderer does not know.

A user writes "a crimson disc in the upper left corner" or "something round the color of grass in
the lower right corner". The renderer (tiny Stable Diffusion 3) was trained only on plain captions:
"red circle top left". The tiny CLIP knows both. So rewriting a prompt as a caption gives a better
picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiny_world.scenes import COLOUR_OF_NOUN, COLOURS, SHAPES, Scene, Shape

COLOUR_OF_ADJECTIVE = {
    "crimson": "red",
    "jade": "green",
    "cobalt": "blue",
    "golden": "yellow",
    "violet": "purple",
    "tangerine": "orange",
    "pearly": "white",
    "raven": "black",
}
SHAPE_OF_NOUN = {"disc": "circle", "box": "square", "wedge": "triangle"}
SHAPE_OF_ADJECTIVE = {"round": "circle", "boxy": "square", "pointed": "triangle"}
CELL_OF_PLACE = {
    "top left": (0, 0),
    "top right": (0, 1),
    "bottom left": (1, 0),
    "bottom right": (1, 1),
}
CELL_OF_CORNER = {
    "upper left": (0, 0),
    "upper right": (0, 1),
    "lower left": (1, 0),
    "lower right": (1, 1),
}
KINDS = ("adjective", "noun", "something")
SYSTEM_PROMPT = "Say in plain words what the picture shows."
"""The rewriter was trained with it; a config's `policy.system_prompt` has to be the same."""


@dataclass(frozen=True)
class Wish:
    """The meaning of a prompt or caption: one shape, its position and its colour."""

    colour: str
    """One of COLOURS."""
    shape: str
    """One of SHAPES."""
    cell: tuple[int, int]
    """(row, column) of the quarter of the picture, each 0 or 1."""


@dataclass(frozen=True)
class UserPrompt:
    """A prompt as a user writes it."""

    text: str
    wish: Wish
    kind: str
    """'adjective': "a crimson disc"; 'noun': "a disc the color of grass"; 'something': "something
    round the color of grass"."""


def caption(wish: Wish) -> str:
    """The plain caption that the renderer understands: "red circle top left"."""
    return f"{wish.colour} {wish.shape} {_name(CELL_OF_PLACE, wish.cell)}"


def prompt_text(wish: Wish, kind: str) -> str:
    """The user's prompt for the wish; `kind` is one of KINDS."""
    corner = f"in the {_name(CELL_OF_CORNER, wish.cell)} corner"
    noun = _name(COLOUR_OF_NOUN, wish.colour)
    if kind == "adjective":
        adjective = _name(COLOUR_OF_ADJECTIVE, wish.colour)
        return f"a {adjective} {_name(SHAPE_OF_NOUN, wish.shape)} {corner}"
    if kind == "noun":
        return f"a {_name(SHAPE_OF_NOUN, wish.shape)} the color of {noun} {corner}"
    return f"something {_name(SHAPE_OF_ADJECTIVE, wish.shape)} the color of {noun} {corner}"


def read_caption(text: str) -> Wish:
    """Parses a plain caption; raises ValueError if `caption` cannot have written it."""
    match text.strip().split():
        case [colour, shape, row, column] if (
            colour in COLOURS and shape in SHAPES and f"{row} {column}" in CELL_OF_PLACE
        ):
            return Wish(colour, shape, CELL_OF_PLACE[f"{row} {column}"])
    raise ValueError(f"{text!r} is not a plain caption such as 'red circle top left'")


def read_prompt(text: str) -> Wish:
    """Parses a user's prompt; raises ValueError if `prompt_text` cannot have written it."""
    try:
        match text.strip().split():
            case ["a", adjective, noun, "in", "the", row, column, "corner"]:
                cell = CELL_OF_CORNER[f"{row} {column}"]
                return Wish(COLOUR_OF_ADJECTIVE[adjective], SHAPE_OF_NOUN[noun], cell)
            case ["a", shape, "the", "color", "of", thing, "in", "the", row, column, "corner"]:
                cell = CELL_OF_CORNER[f"{row} {column}"]
                return Wish(COLOUR_OF_NOUN[thing], SHAPE_OF_NOUN[shape], cell)
            case [
                "something", shape, "the", "color", "of", thing, "in", "the", row, column, "corner",
            ]:  # fmt: skip
                cell = CELL_OF_CORNER[f"{row} {column}"]
                return Wish(COLOUR_OF_NOUN[thing], SHAPE_OF_ADJECTIVE[shape], cell)
    except KeyError as unknown:
        raise ValueError(f"{text!r} says {unknown}, a word of no prompt") from unknown
    raise ValueError(
        f"{text!r} is none of 'a <colour> <shape> in the <corner> corner', 'a <shape> the color of "
        "<noun> in the <corner> corner', 'something <shape> the color of <noun> in the <corner> "
        "corner'"
    )


def scene_of(wish: Wish, background: int = 0, offset_px: tuple[int, int] = (0, 0)) -> Scene:
    """A scene that fulfils the wish, on grey number `background`, with the shape `offset_px` (dy,
    dx) off the centre of its quarter."""
    return Scene(background, (Shape(wish.shape, wish.colour, wish.cell, offset_px),))


def all_wishes() -> list[Wish]:
    """All 96 wishes."""
    return [
        Wish(colour, shape, cell)
        for colour in COLOURS
        for shape in SHAPES
        for cell in CELL_OF_PLACE.values()
    ]


def user_prompts(held_out: bool) -> list[UserPrompt]:
    """All prompts: the 216 training prompts, or the 72 held-out ones.

    A quarter of the (colour, shape) pairs is held out: each word of a held-out prompt occurs in
    training, but not the pair.
    """
    return [
        UserPrompt(prompt_text(wish, kind), wish, kind)
        for wish in all_wishes()
        for kind in KINDS
        if _is_held_out(wish) == held_out
    ]


def _is_held_out(wish: Wish) -> bool:
    return (COLOURS.index(wish.colour) + SHAPES.index(wish.shape)) % 4 == 3


def _name(meanings: Mapping[str, object], meaning: object) -> str:
    return next(name for name, value in meanings.items() if value == meaning)
