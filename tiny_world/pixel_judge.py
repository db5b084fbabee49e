"""A strict judge for the tiny world: grades pixels, never the description that led to them.

Marks from 0 to 10. Two pairs as VIEScore asks for: semantics (did the edit happen, was nothing
else touched) from the source, the result and the instruction; perception (natural, free of
artefacts) from the result alone. The caller takes the minimum of each pair and the square root of
their product. And one mark each: how near a result comes to the reference edit, and whether a
picture shows what a prompt of `captions.py` or `riddles.py` asks for.

Strict means that colours count by their absolute distance to the expected colour, upper
percentiles instead of means so that a blotch or a remnant is not averaged away, and that a
shape must keep its outline.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from PIL import Image

from tiny_world.captions import read_prompt
from tiny_world.riddles import is_riddle, read_riddle
from tiny_world.scenes import (
    BACKGROUNDS_RGB,
    CELL_SIDE_PX,
    COLOURS,
    IMAGE_SIDE_PX,
    JITTER_PX,
    RGB,
    SHAPES,
    Scene,
    Shape,
    apply,
    cell_mask,
    cell_slices,
    read_instruction,
)

CELLS = ((0, 0), (0, 1), (1, 0), (1, 1))
PALETTE_RGB = np.array([RGB[c] for c in COLOURS], np.float32)
GREYS_RGB = np.array(BACKGROUNDS_RGB, np.float32)


class NoSceneError(ValueError):
    """A picture of the right size that shows something else than shapes."""


def grade_semantics(
    source: Image.Image,
    edited: Image.Image,
    instruction: str,
    lenders: Sequence[Image.Image] = (),
) -> tuple[float, float]:
    """(edit success, nothing else touched), each 0-10. `lenders`: the second source picture and
    those after it, which an instruction may speak of and no edit touches.

    Nothing for an edit of what is no scene of this world. ValueError when the instruction is none
    of this world, or a picture of another size.
    """
    pixels = _pixels(edited)
    try:
        scene, *others = (parse_scene(picture) for picture in (source, *lenders))
    except NoSceneError:
        return 0.0, 0.0
    op = read_instruction(instruction, scene, others)
    expected = apply(scene, op)
    background = GREYS_RGB[scene.background]
    target_cell = scene.find(op.shape).cell
    by_cell = {s.cell: s for s in expected.shapes}
    marks = {
        cell: _mark_cell(pixels[cell_slices(cell)], by_cell.get(cell), background) for cell in CELLS
    }
    return marks.pop(target_cell), min(marks.values())


def grade_perception(edited: Image.Image) -> tuple[float, float]:
    """(naturalness, absence of artefacts) of a picture by itself, each 0-10.

    Natural: a known grey behind shapes of known form and known colour. Artefacts: noise,
    blotches, and whatever is neither background nor a shape.
    """
    pixels = _pixels(edited)
    background = np.median(pixels[_gutter()], axis=0)
    natural = [_ramp(np.linalg.norm(GREYS_RGB - background, axis=1).min(), 30, 90)]
    clean = [_ramp(np.percentile(_distance(pixels[_gutter()], background), 95), 12, 72)]
    for cell in CELLS:
        part = pixels[cell_slices(cell)]
        found, overlap = _best_template(_distance(part, background) > 50)
        if found is None:
            clean.append(_ramp(np.percentile(_distance(part, background), 98), 12, 72))
            continue
        core, outside = _core_and_outside(*found)
        colour = np.median(part[core], axis=0)
        natural.append(_ramp(np.linalg.norm(PALETTE_RGB - colour, axis=1).min(), 30, 90))
        natural.append(_mark_overlap(overlap))
        clean.append(_ramp(np.percentile(_distance(part[core], colour), 90), 12, 72))
        clean.append(_ramp(np.percentile(_distance(part[outside], background), 95), 12, 72))
    return min(natural), min(clean)


def grade_likeness(reference: Image.Image, edited: Image.Image) -> float:
    """How near a result comes to the reference edit, 0-10: that of its worst quarter, which gets
    nothing when an eighth of its even areas is of another colour."""
    wanted = _pixels(reference)
    wrong = np.clip((_distance(_pixels(edited), wanted) - 30) / 60, 0, 1)
    # A row or a column at an outline may fall to either side.
    even = ~_grow(_outlines(wanted), 1)
    shares = [
        wrong[cell_slices(cell)][even[cell_slices(cell)]].sum() / CELL_SIDE_PX**2 for cell in CELLS
    ]
    return 10 * float(np.clip(1 - 8 * max(shares), 0, 1))


def grade_wish(picture: Image.Image, prompt: str) -> float:
    """Whether the picture shows what a prompt asks for and nothing else, 0-10. Where in
    its quarter the shape lies, and on which grey, is left open.

    ValueError when the prompt is not one of this world.
    """
    wish = read_riddle(prompt) if is_riddle(prompt) else read_prompt(prompt)
    pixels = _pixels(picture)
    background = GREYS_RGB[_background(pixels)]
    foreground = _distance(pixels[cell_slices(wish.cell)], background) > 50
    found, _ = _best_template(foreground, wish.shape)
    if found is None:
        return 0.0
    wished = Shape(wish.shape, wish.colour, wish.cell, found[1])
    return min(
        _mark_cell(pixels[cell_slices(cell)], wished if cell == wish.cell else None, background)
        for cell in CELLS
    )


def parse_scene(source: Image.Image) -> Scene:
    """Read a drawn picture back; NoSceneError when it is not one `scenes.draw` makes."""
    pixels = _pixels(source)
    background = _background(pixels)
    shapes = []
    for cell in CELLS:
        part = pixels[cell_slices(cell)]
        found, overlap = _best_template(_distance(part, GREYS_RGB[background]) > 50)
        if found is None:
            continue
        if overlap < 0.9:
            raise NoSceneError(f"the source picture shows no circle, square or triangle in {cell}")
        colour = np.median(part[_core_and_outside(*found)[0]], axis=0)
        name = COLOURS[int(np.linalg.norm(PALETTE_RGB - colour, axis=1).argmin())]
        shapes.append(Shape(found[0], name, cell, found[1]))
    return Scene(background, tuple(shapes))


def _mark_cell(part: np.ndarray, expected: Shape | None, background: np.ndarray) -> float:
    """How well one quarter [32, 32, 3] shows the shape that ought to be there, or emptiness."""
    if expected is None:
        return _ramp(np.percentile(_distance(part, background), 98), 30, 90)
    colour = np.array(RGB[expected.colour], np.float32)
    core, outside = _core_and_outside(expected.shape, expected.offset_px)
    towards = colour - background
    shown = (part - background) @ towards / (towards @ towards) > 0.5
    meant = cell_mask(expected.shape, expected.offset_px) > 0.5
    return min(
        _ramp(np.percentile(_distance(part[core], colour), 90), 30, 90),
        _ramp(np.percentile(_distance(part[outside], background), 98), 30, 90),
        _mark_overlap((shown & meant).sum() / (shown | meant).sum()),
    )


def _mark_overlap(overlap: float) -> float:
    """Intersection over union to 0-10: nothing below 0.6, full marks from 0.9."""
    return 10 * float(np.clip((overlap - 0.6) / 0.3, 0, 1))


def _ramp(distance_rgb: float, good: float, bad: float) -> float:
    """Colour distance to 0-10: full marks up to `good`, none from `bad` on."""
    return 10 * float(np.clip((bad - distance_rgb) / (bad - good), 0, 1))


def _pixels(image: Image.Image) -> np.ndarray:
    """[64, 64, 3] float32, 0-255."""
    if image.size != (IMAGE_SIDE_PX, IMAGE_SIDE_PX):
        raise ValueError(f"the picture is {image.size}, expected 64x64: this judge never resizes")
    return np.asarray(image.convert("RGB"), np.float32)


def _background(pixels: np.ndarray) -> int:
    """Index of the grey that the picture most likely lies on."""
    median = np.median(pixels[_gutter()], axis=0)
    return int(np.linalg.norm(GREYS_RGB - median, axis=1).argmin())


def _distance(pixels: np.ndarray, colour: np.ndarray) -> np.ndarray:
    return np.linalg.norm(pixels - colour, axis=-1)


@functools.cache
def _gutter() -> np.ndarray:
    """[64, 64] bool: the pixels no shape can reach, always background in a clean picture."""
    reach = np.zeros((CELL_SIDE_PX, CELL_SIDE_PX), bool)
    reach[2:-2, 2:-2] = True
    return ~np.tile(reach, (2, 2))


@functools.cache
def _templates(
    shape: str | None,
) -> tuple[tuple[tuple[str, tuple[int, int]], ...], np.ndarray]:
    """Every offset of every shape (75) or of one (25), and their masks as [n, 1024] float32 of 0
    and 1."""
    steps = range(-JITTER_PX, JITTER_PX + 1)
    shapes = SHAPES if shape is None else (shape,)
    keys = tuple((s, (dy, dx)) for s in shapes for dy in steps for dx in steps)
    return keys, np.stack([cell_mask(*k).ravel() > 0.5 for k in keys]).astype(np.float32)


def _best_template(
    foreground: np.ndarray, shape: str | None = None
) -> tuple[tuple[str, tuple[int, int]] | None, float]:
    """The shape (any, or the one named) and offset that overlap a [32, 32] bool mask best, and the
    overlap; None when the mask is empty."""
    if foreground.sum() < 40:
        return None, 1.0
    keys, masks = _templates(shape)
    flat = foreground.ravel().astype(np.float32)
    both = masks @ flat
    overlap = both / (masks.sum(1) + flat.sum() - both)
    best = int(overlap.argmax())
    return keys[best], float(overlap[best])


@functools.cache
def _core_and_outside(shape: str, offset_px: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """[32, 32] bool each: at least two pixels inside the outline, and two outside it."""
    mask = cell_mask(shape, offset_px) > 0.5
    return ~_grow(~mask, 2), ~_grow(mask, 2)


def _outlines(pixels: np.ndarray) -> np.ndarray:
    """[64, 64] bool: the pixels beside which the colour changes at once."""
    changes = np.zeros(pixels.shape[:2], bool)
    down = _distance(pixels[1:], pixels[:-1]) > 40
    right = _distance(pixels[:, 1:], pixels[:, :-1]) > 40
    changes[1:] |= down
    changes[:-1] |= down
    changes[:, 1:] |= right
    changes[:, :-1] |= right
    return changes


def _grow(mask: np.ndarray, pixels: int) -> np.ndarray:
    """A mask and its neighbours (4-connected), `pixels` times."""
    for _ in range(pixels):
        p = np.pad(mask, 1)
        mask = p[1:-1, 1:-1] | p[:-2, 1:-1] | p[2:, 1:-1] | p[1:-1, :-2] | p[1:-1, 2:]
    return mask
