"""Held-out scenes for the editor, rendered from descriptions and graded by the pixel judge."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from tiny_world.builder.models import encode, render
from tiny_world.builder.policy import random_op
from tiny_world.builder.reader import Reader
from tiny_world.pixel_judge import grade_perception, grade_semantics
from tiny_world.scenes import (
    Op,
    Scene,
    Task,
    describe,
    draw,
    draw_array,
    make_instruction,
    make_scene,
)


def overall(scenes: Sequence[Scene], task: Task, edited: np.ndarray) -> float:
    """VIEScore's overall mark, 0-10, of `edited` [64, 64, 3] uint8, an edit of the first scene."""
    source, *lenders = (draw(scene) for scene in scenes)
    picture = Image.fromarray(edited)
    semantics = min(grade_semantics(source, picture, task.instruction, lenders))
    return math.sqrt(semantics * min(grade_perception(picture)))


class Exam:
    """Held-out scenes with right and wrong descriptions."""

    def __init__(self, reader: Reader, vae, num: int = 64, seed: int = 9) -> None:
        rng = random.Random(seed)
        self.reader, self.vae = reader, vae
        self.scenes = [make_scene(rng) for _ in range(num)]
        self.tasks = [make_instruction(rng, scene) for scene in self.scenes]
        self.pictures = [draw_array(scene) for scene in self.scenes]
        pairs = list(zip(self.tasks, self.scenes, strict=True))
        self.right = [describe(t.op, s) for t, s in pairs]
        self.wrong = [describe(another(rng, s, t.op), s) for t, s in pairs]
        self.source = encode(vae, self.pictures)
        self.noise = torch.randn(self.source.shape, generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def render(self, transformer, descriptions: Sequence[str], steps: int) -> np.ndarray:
        instructions = [task.instruction for task in self.tasks]
        reading = self.reader.read(self.pictures, instructions, descriptions)
        condition = reading.hidden, reading.mask
        return render(transformer, self.vae, self.source, *condition, self.noise, steps)

    def grade(self, edited: np.ndarray) -> list[float]:
        """VIEScore's overall mark of each picture, 0-10."""
        return [
            overall([scene], task, pixels)
            for scene, task, pixels in zip(self.scenes, self.tasks, edited, strict=True)
        ]

    def marks(self, transformer) -> dict[str, float]:
        """Mean mark with right descriptions (2 and 4 steps) and wrong ones (2 steps)."""
        runs = {"right_2": (self.right, 2), "right_4": (self.right, 4), "wrong_2": (self.wrong, 2)}
        return {
            name: round(float(np.mean(self.grade(self.render(transformer, texts, steps)))), 2)
            for name, (texts, steps) in runs.items()
        }


def another(rng: random.Random, scene: Scene, op: Op) -> Op:
    while (other := random_op(rng, scene)) == op:
        pass
    return other
