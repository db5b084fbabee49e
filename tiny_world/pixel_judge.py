"""A strict judge for the tiny world that grades only pixels.

All marks are 0 to 10. As in VIEScore, semantics is a pair (is the edit done, is the rest unchanged)
that depends on source, result and instruction, and perception is a pair (natural, free of
artefacts) that depends only on the result; the caller takes the square root of the product of the
pairs' minima. There are two single marks: likeness to the target picture, and whether a picture
fulfils a prompt of `captions.py` or `riddles.py`.

Strict means: colours count by their absolute distance to the expected colour, upper percentiles
instead of means keep blotches and remnants from being averaged away, and a shape must keep its
outline.
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
    MissingShapeError,
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
    """A picture of the right size is not a scene of shapes."""


def grade_semantics(
    source: Image.Image, edited: Image.Image, instruction: str, lenders: Sequence[Image.Image] = ()
) -> tuple[float, float]:
    """(edit success, the rest unchanged), each 0-10. `lenders`: further source pictures, which an
    instruction may mention and no edit changes.

    Both marks are 0 if a source is no scene of this world, or lacks what the instruction names.
    Raises ValueError for an unknown instruction and for a picture of another size.
    """
    pixels = _pixels(edited)
    try:
        scene, *others = (parse_scene(picture) for picture in (source, *lenders))
    except NoSceneError:
        return 0.0, 0.0
    try:
        op = read_instruction(instruction, scene, others)
    except MissingShapeError:
        return 0.0, 0.0
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

    Natural: a known grey behind shapes of known form and colour. Artefacts: noise, blotches, and
    anything that is neither background nor a shape.
    """
    pixels = _pixels(edited)
    background = np.median(pixels[_gutter()], axis=0)
    natural = [_ramp(np.linalg.norm(GREYS_RGB - background, axis=1).min(), 30, 90)]
    clean = [_ramp(np.percentile(_distance(pixels[_gutter()], background), 95), 12, 72)]
    for cell in CELLS:
        part = pixels[cell_slices(cell)]
        best, overlap = _best_template(_distance(part, background) > 50)
        if best is None:
            clean.append(_ramp(np.percentile(_distance(part, background), 98), 12, 72))
            continue
        core, outside = _core_and_outside(*best)
        colour = np.median(part[core], axis=0)
        natural.append(_ramp(np.linalg.norm(PALETTE_RGB - colour, axis=1).min(), 30, 90))
        natural.append(_mark_overlap(overlap))
        clean.append(_ramp(np.percentile(_distance(part[core], colour), 90), 12, 72))
        clean.append(_ramp(np.percentile(_distance(part[outside], background), 95), 12, 72))
    return min(natural), min(clean)


def grade_likeness(reference: Image.Image, edited: Image.Image) -> float:
    """Likeness to the target picture, 0-10, of the worst quarter; it is 0 if an eighth of the
    quarter (outlines excepted) has another colour."""
    target = _pixels(reference)
    wrong = np.clip((_distance(_pixels(edited), target) - 30) / 60, 0, 1)
    # Pixels at an outline may be of either side.
    inner = ~_grow(_outlines(target), 1)
    shares = [
        wrong[cell_slices(cell)][inner[cell_slices(cell)]].sum() / CELL_SIDE_PX**2 for cell in CELLS
    ]
    return 10 * float(np.clip(1 - 8 * max(shares), 0, 1))


def grade_wish(picture: Image.Image, prompt: str) -> float:
    """Whether the picture fulfils a prompt and shows nothing else, 0-10. The grey and the exact
    position in the quarter do not matter.

    Raises ValueError for an unknown prompt.
    """
    wish = read_riddle(prompt) if is_riddle(prompt) else read_prompt(prompt)
    pixels = _pixels(picture)
    background = GREYS_RGB[_background(pixels)]
    foreground = _distance(pixels[cell_slices(wish.cell)], background) > 50
    best, _ = _best_template(foreground, wish.shape)
    if best is None:
        return 0.0
    wished = Shape(wish.shape, wish.colour, wish.cell, best[1])
    return min(
        _mark_cell(pixels[cell_slices(cell)], wished if cell == wish.cell else None, background)
        for cell in CELLS
    )


def parse_scene(source: Image.Image) -> Scene:
    """Parses a drawn picture; raises NoSceneError if `scenes.draw` cannot have drawn it."""
    pixels = _pixels(source)
    background = _background(pixels)
    shapes = []
    for cell in CELLS:
        part = pixels[cell_slices(cell)]
        best, overlap = _best_template(_distance(part, GREYS_RGB[background]) > 50)
        if best is None:
            continue
        if overlap < 0.9:
            raise NoSceneError(f"the source picture shows no circle, square or triangle in {cell}")
        colour = np.median(part[_core_and_outside(*best)[0]], axis=0)
        name = COLOURS[int(np.linalg.norm(PALETTE_RGB - colour, axis=1).argmin())]
        shapes.append(Shape(best[0], name, cell, best[1]))
    return Scene(background, tuple(shapes))


def _mark_cell(part: np.ndarray, expected: Shape | None, background: np.ndarray) -> float:
    """Mark of a quarter [32, 32, 3] that should show `expected` (None: only the background)."""
    if expected is None:
        return _ramp(np.percentile(_distance(part, background), 98), 30, 90)
    colour = np.array(RGB[expected.colour], np.float32)
    core, outside = _core_and_outside(expected.shape, expected.offset_px)
    towards = colour - background
    drawn = (part - background) @ towards / (towards @ towards) > 0.5
    mask = cell_mask(expected.shape, expected.offset_px) > 0.5
    return min(
        _ramp(np.percentile(_distance(part[core], colour), 90), 30, 90),
        _ramp(np.percentile(_distance(part[outside], background), 98), 30, 90),
        _mark_overlap((drawn & mask).sum() / (drawn | mask).sum()),
    )


def _mark_overlap(overlap: float) -> float:
    """Intersection over union to 0-10: 0 below 0.6, 10 from 0.9."""
    return 10 * float(np.clip((overlap - 0.6) / 0.3, 0, 1))


def _ramp(distance_rgb: float, good: float, bad: float) -> float:
    """Colour distance to 0-10: 10 up to `good`, 0 from `bad`."""
    return 10 * float(np.clip((bad - distance_rgb) / (bad - good), 0, 1))


def _pixels(image: Image.Image) -> np.ndarray:
    """[64, 64, 3] float32, 0-255."""
    if image.size != (IMAGE_SIDE_PX, IMAGE_SIDE_PX):
        raise ValueError(
            f"the picture is {image.size}, expected 64x64: this judge compares the pixels of drawn "
            "shapes; docs/without-training.md has one of a few lines that takes any picture"
        )
    return np.asarray(image.convert("RGB"), np.float32)


def _background(pixels: np.ndarray) -> int:
    """Index of the picture's most likely background grey."""
    median = np.median(pixels[_gutter()], axis=0)
    return int(np.linalg.norm(GREYS_RGB - median, axis=1).argmin())


def _distance(pixels: np.ndarray, colour: np.ndarray) -> np.ndarray:
    return np.linalg.norm(pixels - colour, axis=-1)


@functools.cache
def _gutter() -> np.ndarray:
    """[64, 64] bool: pixels that no shape reaches, always background in a clean picture."""
    reach = np.zeros((CELL_SIDE_PX, CELL_SIDE_PX), bool)
    reach[2:-2, 2:-2] = True
    return ~np.tile(reach, (2, 2))


@functools.cache
def _templates(shape: str | None) -> tuple[tuple[tuple[str, tuple[int, int]], ...], np.ndarray]:
    """All n (shape, offset), 75 (25 for one `shape`); their masks [n, 1024] float32, 0 or 1."""
    steps = range(-JITTER_PX, JITTER_PX + 1)
    shapes = SHAPES if shape is None else (shape,)
    keys = tuple((s, (dy, dx)) for s in shapes for dy in steps for dx in steps)
    return keys, np.stack([cell_mask(*k).ravel() > 0.5 for k in keys]).astype(np.float32)


def _best_template(
    foreground: np.ndarray, shape: str | None = None
) -> tuple[tuple[str, tuple[int, int]] | None, float]:
    """The (shape, offset) that overlaps a [32, 32] bool mask best (of all shapes, or of `shape`),
    and the overlap; None if the mask is almost empty."""
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
    """[64, 64] bool: pixels whose neighbour has a clearly different colour."""
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
