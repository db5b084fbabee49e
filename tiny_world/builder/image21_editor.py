"""Stage image21_editor: trains Qwen-Image-2.1 to follow the policy's states before its last norm.

As `editor.py`, in rounds with other inputs: fixed codes of the words, from which it learns to
recolour shapes and to keep the rest; states of a policy that is always right; twice the states of a
policy that doubts and drifts. Each round saves its transformer in `work` and is skipped if that
exists.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Transformer2DModel,
)

from tiny_world.builder.drift import Drifter, load_bank
from tiny_world.builder.editor import rate, some_edit
from tiny_world.builder.exam import overall
from tiny_world.builder.image21_flow import Condition, render, velocity
from tiny_world.builder.image21_models import encode, load_policy, make_transformer
from tiny_world.builder.image21_policy import Case, QuarterReadOut, make_case, quarters_of
from tiny_world.builder.image21_reader import PicturesReader
from tiny_world.builder.image21_tokenizer import editing_tokenizer
from tiny_world.builder.models import HIDDEN, SCHEDULER
from tiny_world.builder.policy import RoleReadOut, random_op
from tiny_world.builder.reader import Reading
from tiny_world.builder.training import export, fit, flow_loss
from tiny_world.scenes import describe, draw_array


class Round(NamedTuple):
    """One learning-rate cycle, which continues from the round before it."""

    name: str
    policy: str | None
    """The warm-started policy whose states the editor reads; None: fixed codes."""
    drifts: bool
    """Half of the steps read a drifted policy."""
    steps: int
    peak_rate: float
    num_examples: int
    """Size of the pool of encoded examples, at least half of them with two sources."""


ROUNDS = (
    Round("image21_editor_codes", None, False, 800, 3e-3, 3000),
    Round("image21_editor_knowing", "image21_policy_knowing", False, 600, 2.5e-3, 3000),
    Round("image21_editor_doubting", "image21_policy_doubting", True, 4000, 2.5e-3, 3000),
    Round("image21_editor_settling", "image21_policy_doubting", True, 3000, 1.5e-3, 6000),
)
Read = Callable[[list[Case], list[str]], Reading]
"""(cases, their descriptions) -> the states that the editor reads."""
SHARE_AT_1 = 0.8  # two Euler steps (the last from sigma 0.02) make the picture mostly at t = 1


def build(work: Path) -> None:
    vae = AutoencoderKLQwenImage21.from_pretrained(work / "image21_vae").eval()
    vae.requires_grad_(False)
    before = None
    for plan in ROUNDS:
        if not (work / plan.name).exists():
            _train(work, vae, plan, before)
        before = work / plan.name
    export("image21/vae", vae)
    export("image21/transformer", QwenImage21Transformer2DModel.from_pretrained(before))
    export("image21/scheduler", FlowMatchEulerDiscreteScheduler(**SCHEDULER))


def _train(work: Path, vae, plan: Round, start: Path | None, batch: int = 16) -> None:
    torch.manual_seed(1)
    rng = random.Random(plan.name)
    pool = _Pool(vae, rng, plan.num_examples)
    policy = load_policy(work / plan.policy) if plan.policy else None
    reader, drifter = PicturesReader(policy, editing_tokenizer()), None
    states_of = Codes(reader) if policy is None else partial(read, reader)
    if plan.drifts:
        drifter = Drifter(policy, load_bank(work / "image21_drift.safetensors"))
    transformer = make_transformer()
    if start is not None:
        transformer = QwenImage21Transformer2DModel.from_pretrained(start)
    exam = Exam(states_of, reader.image_id, vae)

    def loss_of(step: int) -> torch.Tensor:
        if drifter is not None and step % 2:
            drifter.drift(rng)
        examples = pool.some(rng, rng.choice((1, 2)), batch)
        age = step if not start else None
        condition = _condition(states_of, reader.image_id, examples, rng, age)
        x0 = torch.stack([example.x0 for example in examples])
        return flow_loss(
            lambda xt, t: velocity(transformer, xt, t, condition), x0, SHARE_AT_1, skew=0.8
        )

    def check() -> dict[str, float]:
        if drifter is not None:
            drifter.restore()
        return exam.marks(transformer)

    fit(
        plan.name,
        transformer.parameters(),
        plan.steps,
        plan.peak_rate,
        loss_of,
        check,
        check_every=500,
        rate_of=lambda step: rate(step, plan.steps),
    )
    transformer.save_pretrained(work / plan.name)


def read(reader: PicturesReader, cases: list[Case], descriptions: list[str]) -> Reading:
    """`Read` of that reader."""
    pictures = [case.pictures for case in cases]
    return reader.read(pictures, [case.task.instruction for case in cases], descriptions)


class Codes:
    """Replaces a policy: each token has a fixed vector, to which description tokens add the
    directions of the two read-outs that the policy is trained with."""

    def __init__(self, reader: PicturesReader) -> None:
        generator = torch.Generator().manual_seed(7)
        self.reader, self.roles, self.quarters = reader, RoleReadOut(reader), QuarterReadOut(reader)
        vectors = torch.randn(len(reader.tokenizer), HIDDEN, generator=generator)
        self.token_vectors = 0.7 * F.normalize(vectors, dim=1)

    def __call__(self, cases: list[Case], descriptions: list[str]) -> Reading:
        instructions = [case.task.instruction for case in cases]
        numbers = [len(case.scenes) for case in cases]
        ids, mask, written = self.reader.lay_out(numbers, instructions, descriptions)
        pairs = zip(cases, descriptions, strict=True)
        quarters = [quarters_of(text, case.scenes[0]) for case, text in pairs]
        labels = (self.roles.labels(ids, written), self.quarters.labels(written, quarters))
        hidden = self.token_vectors[ids]
        for read_out, label in zip((self.roles, self.quarters), labels, strict=True):
            hidden = hidden + read_out.directions[label] * (label >= 0)[..., None]
        return Reading(hidden, ids, mask, written)


class Example(NamedTuple):
    """An edit with its pictures' latents."""

    case: Case
    description: str
    """Describes the edit from sources to x0, mostly not what the instruction asks for."""
    sources: torch.Tensor
    """[K, 16, C]"""
    x0: torch.Tensor
    """[16, C]"""


class _Pool:
    """Examples whose pictures are encoded once; the policy reads them again each time."""

    def __init__(self, vae, rng: random.Random, num: int) -> None:
        self.by_sources: dict[int, list[Example]] = {1: [], 2: []}
        for _ in range(num):
            case = make_case(rng, "borrow" if rng.random() < 0.5 else None)
            description, target = some_edit(rng, case.scenes[0], case.task)
            latents = encode(vae, [*case.pictures, draw_array(target)])
            example = Example(case, description, latents[:-1], latents[-1])
            self.by_sources[len(case.scenes)].append(example)

    def some(self, rng: random.Random, num_sources: int, num: int) -> list[Example]:
        return rng.sample(self.by_sources[num_sources], num)


@torch.no_grad()
def _condition(
    states_of: Read, image_id: int, examples: list[Example], rng: random.Random, age: int | None
) -> Condition:
    """In the first round (`age`: its steps so far, else None) at first all examples show only the
    description, and more and more then also the prompt."""
    reading = states_of([e.case for e in examples], [e.description for e in examples])
    condition = condition_of(image_id, reading, torch.stack([e.sources for e in examples]))
    blur = 0.1 * rng.random() * (1 if age is None else min(1, age / 400))
    states = condition.states + blur * reading.hidden.std() * torch.randn_like(condition.states)
    visible = condition.visible.clone()
    for row in range(len(examples)):
        if age is not None and rng.random() >= (age - 150) / 150:
            visible[row] &= reading.written[row]
    return Condition(states, visible, condition.lengths, condition.is_image, condition.sources)


def condition_of(image_id: int, reading: Reading, sources: torch.Tensor) -> Condition:
    """The condition of rows that all have the same number of pictures."""
    is_image = (reading.token_ids == image_id)[0]
    return Condition(reading.hidden, reading.mask, reading.mask.sum(1), is_image, sources)


class Exam:
    """Held-out cases with one picture and with two, with right and wrong descriptions."""

    def __init__(self, states_of: Read, image_id: int, vae, num: int = 64, seed: int = 9) -> None:
        rng = random.Random(seed)
        self.states_of, self.image_id, self.vae = states_of, image_id, vae
        cases = [make_case(rng) for _ in range(num)]
        self.halves = [[case for case in cases if len(case.scenes) == n] for n in (1, 2)]
        self.wrong = {id(case): _another(rng, case) for case in cases}

    @torch.no_grad()
    def marks(self, transformer) -> dict[str, float]:
        """Mean mark, 0-10, with right descriptions (2 and 4 steps; with one picture and with two)
        and with wrong ones (2 steps)."""
        one, two = self.halves
        marks = {
            "right_1": self.grade(transformer, one, 2),
            "right_2": self.grade(transformer, two, 2),
            "right_4_steps": self.grade(transformer, one, 4),
            "wrong": self.grade(transformer, one, 2, self.wrong)
            + self.grade(transformer, two, 2, self.wrong),
        }
        return {name: round(float(np.mean(values)), 2) for name, values in marks.items()}

    def render(
        self, transformer, cases: list[Case], descriptions: list[str], steps: int
    ) -> np.ndarray:
        sources = torch.stack([encode(self.vae, case.pictures) for case in cases])
        noise = torch.randn(sources[:, 0].shape, generator=torch.Generator().manual_seed(1))
        condition = condition_of(self.image_id, self.states_of(cases, descriptions), sources)
        return render(transformer, self.vae, condition, noise, steps)

    def grade(
        self, transformer, cases: list[Case], steps: int, other: dict[int, str] | None = None
    ) -> list[float]:
        """VIEScore's overall mark of each case; `other`: descriptions instead of the right ones."""
        texts = [
            describe(case.task.op, case.scenes[0]) if other is None else other[id(case)]
            for case in cases
        ]
        edited = self.render(transformer, cases, texts, steps)
        return [
            overall(case.scenes, case.task, pixels)
            for case, pixels in zip(cases, edited, strict=True)
        ]


def _another(rng: random.Random, case: Case) -> str:
    scene = case.scenes[0]
    while (other := random_op(rng, scene)) == case.task.op:
        pass
    return describe(other, scene)
