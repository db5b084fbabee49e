"""Scenes as 4x4 codebook indices, which the tiny Emu3 reads and writes.

A code is one 16x16 px block: an empty background, or one quarter of a shape of one form and colour
on one background. So shapes are in the centre of their quarter of the picture, and an edit changes
only the four codes of its shape. The tiny Emu3VQVAE is trained on these codes.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from tiny_world.scenes import (
    BACKGROUNDS_RGB,
    CELL_SIDE_PX,
    COLOURS,
    IMAGE_SIDE_PX,
    SHAPES,
    Scene,
    make_scene,
)

BLOCK_SIDE_PX = CELL_SIDE_PX // 2
GRID_SIDE = IMAGE_SIDE_PX // BLOCK_SIDE_PX
NUM_QUARTERS = 4
NUM_CODES = len(BACKGROUNDS_RGB) * (1 + len(SHAPES) * len(COLOURS) * NUM_QUARTERS)


def make_centred_scene(rng: random.Random) -> Scene:
    """A scene of `scenes.make_scene` with its shapes in the centres of their quarters."""
    scene = make_scene(rng)
    return replace(scene, shapes=tuple(replace(s, offset_px=(0, 0)) for s in scene.shapes))


def encode(scene: Scene) -> np.ndarray:
    """[4, 4] int32 codes of a centred scene."""
    codes = np.full((GRID_SIDE, GRID_SIDE), scene.background, np.int32)
    for shape in scene.shapes:
        row, column = (2 * index for index in shape.cell)
        for quarter in range(NUM_QUARTERS):
            position = row + quarter // 2, column + quarter % 2
            codes[position] = code_of(scene.background, shape.shape, shape.colour, quarter)
    return codes


def code_of(background: int, shape: str, colour: str, quarter: int) -> int:
    """The code of one quarter of a shape: 0 upper left, 1 upper right, 2 lower left, 3 lower right.
    Codes below the number of backgrounds are empty blocks."""
    form, paint = SHAPES.index(shape), COLOURS.index(colour)
    kind = (background * len(SHAPES) + form) * len(COLOURS) + paint
    return len(BACKGROUNDS_RGB) + kind * NUM_QUARTERS + quarter
