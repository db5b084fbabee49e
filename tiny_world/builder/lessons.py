"""The lessons of policies that read pictures: to recognize shapes, and to write."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from tiny_world.builder.reader import Reader, Reading
from tiny_world.builder.training import fit
from tiny_world.questions import DIGITS, Numbers, draw_array
from tiny_world.scenes import COLOURS, IMAGE_SIDE_PX, SHAPES, Scene, cell_slices

CLASSES = ([f" {c}" for c in COLOURS], [f" {s}" for s in SHAPES], [str(d) for d in DIGITS])
"""Tokens for the colour, shape and digit that an image token may show."""


def learn_to_look(
    reader: Reader,
    make_picture: Callable[[], Scene | Numbers],
    num_kinds: int,
    steps: int,
    peak_rate: float,
    batch: int = 32,
) -> None:
    """Trains only the vision tower: image tokens learn to predict the colour, the shape and (if
    `num_kinds` is 3) the digit that they show, by the embeddings of these words."""
    visual = reader.policy.model.visual
    embedding = reader.policy.get_input_embeddings().weight.detach()
    tables = [[reader.tokens(word)[0] for word in words] for words in CLASSES[:num_kinds]]

    def loss_of(step: int) -> torch.Tensor:
        pictures = [make_picture() for _ in range(batch)]
        x = reader.look([draw_array(picture) for picture in pictures])
        side = math.isqrt(x.shape[1])
        labels = torch.stack([_labels(picture, side) for picture in pictures], 1)[:num_kinds]
        return sum(
            F.cross_entropy((x @ embedding[ids].T).flatten(0, 1), y.flatten(), ignore_index=-1)
            for ids, y in zip(tables, labels, strict=True)
        )

    fit("look", visual.parameters(), steps, peak_rate, loss_of)


def _labels(picture: Scene | Numbers, side: int) -> torch.Tensor:
    """[3, side, side] classes of colour, shape and digit in each image token's quarter, -1: none.
    `side`: image tokens along a side of the picture."""
    labels = torch.full((3, side, side), -1)
    size = side // 2

    def mark(cell: tuple[int, int], kind: int, label: int) -> None:
        rows, columns = cell_slices(cell)
        up, left = (part.start * side // IMAGE_SIDE_PX for part in (rows, columns))
        labels[kind, up : up + size, left : left + size] = label

    if isinstance(picture, Numbers):
        for column, digit in enumerate(picture.digits):
            mark((picture.row, column), 2, DIGITS.index(digit))
        return labels
    for shape in picture.shapes:
        mark(shape.cell, 0, COLOURS.index(shape.colour))
        mark(shape.cell, 1, SHAPES.index(shape.shape))
    return labels


def learn_to_write(
    reader: Reader,
    name: str,
    examples: Callable[[], tuple[Sequence[np.ndarray], Sequence[str], Sequence[str]]],
    steps: int,
    peak_rate: float,
    check: Callable[[], object],
    also: Callable[[Reading], torch.Tensor] | None = None,
) -> None:
    """Supervised fine-tuning on (pictures, instructions, texts to write); `also`: an added loss."""

    def loss_of(step: int) -> torch.Tensor:
        reading = reader.read(*examples())
        loss = reader.nll(reading).sum() / reading.written.sum()
        return loss if also is None else loss + also(reading)

    fit(name, reader.policy.parameters(), steps, peak_rate, loss_of, check, check_every=200)
