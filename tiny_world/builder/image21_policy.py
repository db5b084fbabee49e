"""Stage image21_policy: warm-starts a Qwen3-VL that reads one or two pictures and is often wrong.

The lessons are those of `policy.py`. Besides its read-out of the written token, a second temporary
read-out predicts, from the last hidden state of each token after a shape's name, the quarter of the
first picture that has the shape, or that none has it. So the states that Qwen-Image-2.1 reads say
both what to change and where.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tiny_world.builder.image21_models import load_policy, make_policy
from tiny_world.builder.image21_reader import Pictures, PicturesReader
from tiny_world.builder.image21_tokenizer import editing_tokenizer, image_processor
from tiny_world.builder.lessons import learn_to_look, learn_to_write
from tiny_world.builder.models import HIDDEN
from tiny_world.builder.policy import Answer, RoleReadOut, beginner_ops, initialise, right
from tiny_world.builder.reader import Reading
from tiny_world.builder.training import export
from tiny_world.scenes import (
    SHAPES,
    Scene,
    Task,
    describe,
    draw_array,
    make_borrowing,
    make_instruction,
    make_scene,
)

KINDS = {"noun": 0.25, "match": 0.25, "erase": 0.15, "borrow": 0.35}  # harder ones more often
NOWHERE = 4


class Case(NamedTuple):
    """A requested edit."""

    scenes: tuple[Scene, ...]
    """The scenes of the pictures; the first one is edited."""
    task: Task

    @property
    def pictures(self) -> Pictures:
        return [draw_array(scene) for scene in self.scenes]


def make_case(rng: random.Random, kind: str | None = None) -> Case:
    """A case of that kind, or of a random one with the shares KINDS."""
    kind = kind or rng.choices(list(KINDS), list(KINDS.values()))[0]
    scene = make_scene(rng)
    if kind == "borrow":
        lender = make_scene(rng)
        return Case((scene, lender), make_borrowing(rng, scene, lender))
    while (task := make_instruction(rng, scene)).kind != kind:
        pass
    return Case((scene,), task)


def build(work: Path) -> None:
    torch.manual_seed(0)
    tokenizer = editing_tokenizer()
    knowing = work / "image21_policy_knowing"
    if not knowing.exists():
        _learn_to_know(tokenizer).save_pretrained(knowing)
    policy = load_policy(knowing).train().requires_grad_(True)
    reader, rng = PicturesReader(policy, tokenizer), random.Random(212)
    _learn_to_write(reader, rng, "doubt", 250, 0.15, partial(beginner_ops, settled=False))
    policy.save_pretrained(work / "image21_policy_doubting")
    settled = partial(beginner_ops, settled=True)
    _learn_to_write(reader, random.Random(211), "settle", 150, 0.15, settled, peak_rate=7e-4)
    export("image21/policy", policy, tokenizer, image_processor())


def _learn_to_know(tokenizer):
    policy = make_policy(tokenizer)
    _initialise(policy)
    reader, rng = PicturesReader(policy, tokenizer), random.Random(210)
    learn_to_look(reader, lambda: make_scene(rng), num_kinds=2, steps=150, peak_rate=2e-3)
    _learn_to_write(reader, rng, "ask", 350, 0.85, right)
    _learn_to_write(reader, rng, "know", 600, 0.2, right)
    return policy


@torch.no_grad()
def _initialise(policy) -> None:
    """As for Qwen2.5-VL, and with deepstack levels that at first add little."""
    initialise(policy)
    for merger in policy.model.visual.deepstack_merger_list:
        merger.linear_fc2.weight.mul_(0.1)


def _learn_to_write(
    reader: PicturesReader,
    rng: random.Random,
    name: str,
    steps: int,
    share_questions: float,
    answer: Answer,
    peak_rate: float = 2e-3,
    batch: int = 24,
) -> None:
    """`share_questions`: share of questions among the examples, 0..1; the rest are instructions."""
    quarters: list[list[int]] = []

    def examples() -> tuple[list[Pictures], list[str], list[str]]:
        cases = [make_case(rng) for _ in range(batch)]
        lessons = [_lesson(rng, case, share_questions, answer) for case in cases]
        quarters[:] = [
            quarters_of(written, case.scenes[0])
            for case, (_, written) in zip(cases, lessons, strict=True)
        ]
        return [case.pictures for case in cases], *zip(*lessons, strict=True)

    role_read_out, quarter_read_out = RoleReadOut(reader), QuarterReadOut(reader)
    learn_to_write(
        reader,
        name,
        examples,
        steps,
        peak_rate,
        partial(p_right, reader),
        also=lambda r: role_read_out.loss(r) + quarter_read_out.loss(r, quarters),
    )


def _lesson(
    rng: random.Random, case: Case, share_questions: float, answer: Answer
) -> tuple[str, str]:
    """(instruction, the text to write)"""
    if rng.random() < share_questions:
        return _question(rng, case.scenes)
    scene, task = case.scenes[0], case.task
    return task.instruction, describe(answer(rng, scene, task), scene)


def _question(rng: random.Random, scenes: Sequence[Scene]) -> tuple[str, str]:
    number = rng.randrange(len(scenes))
    scene, which = scenes[number], f"in picture {number + 1}"
    if rng.random() < 0.4:
        in_order = sorted(scene.shapes, key=lambda s: SHAPES.index(s.shape))
        return f"what is {which}", "a " + " ".join(f"{s.colour} {s.shape}" for s in in_order) + "."
    shape = rng.choice(scene.shapes)
    return f"what color is the {shape.shape} {which}", f"the {shape.colour}."


def quarters_of(description: str, scene: Scene) -> list[int]:
    """For each word and full stop the quarter of the shape that its sentence has named so far: 0 to
    3, NOWHERE, or -1 before the name. Empty if the text is not a description."""
    quarters = []
    for sentence in description.split(".")[:-1]:
        words = sentence.split()
        if words[0] not in ("turn", "remove"):
            return []
        colour, shape = words[2:4]
        matches = [s for s in scene.shapes if (s.colour, s.shape) == (colour, shape)]
        quarter = 2 * matches[0].cell[0] + matches[0].cell[1] if matches else NOWHERE
        quarters += [-1] * 3 + [quarter] * (len(words) - 2)
    return quarters


class QuarterReadOut:
    """Predicts a shape's quarter: fixed random directions, one per quarter and one for nowhere."""

    def __init__(self, reader: PicturesReader) -> None:
        generator = torch.Generator().manual_seed(6)
        self.reader = reader
        self.directions = F.normalize(torch.randn(5, HIDDEN, generator=generator), dim=1)

    def labels(self, written: torch.Tensor, quarters: list[list[int]]) -> torch.Tensor:
        """The quarter of each token [B, L], -1 for none; written [B, L] bool."""
        labels = torch.full(written.shape, -1)
        for row, values in enumerate(quarters):
            first = int(written[row].int().argmax())
            labels[row, first : first + len(values)] = torch.tensor(values, dtype=torch.long)
        return labels

    def loss(self, reading: Reading, quarters: list[list[int]]) -> torch.Tensor:
        """Mean cross-entropy over the description tokens that have a quarter, nats."""
        labels = self.labels(reading.written, quarters)
        logits = self.reader.readable(reading.hidden) @ self.directions.T
        total = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum"
        )
        return total / (labels >= 0).sum().clamp(min=1)


@torch.no_grad()
def p_right(reader: PicturesReader, num: int = 128) -> dict[str, float]:
    """Mean probability of the right description, by kind of instruction."""
    rng = random.Random(7)
    cases = [make_case(rng) for _ in range(num)]
    rows = [
        (
            case.task.kind,
            case.pictures,
            case.task.instruction,
            describe(case.task.op, case.scenes[0]),
        )
        for case in cases
    ]
    return reader.p_by_kind(rows)
