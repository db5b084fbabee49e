"""Stage image21_editor: teach Qwen-Image-2.1 to do what the policy's states before its norm say.

As `editor.py`. Of two Euler steps the last is from sigma 0.02: the picture is made at t = 1, so
most of the batch is trained there. Rounds: words as clean codes, which needs no policy and is
when it learns to recolour and to leave alone; the states of a policy that is always right; those of
one that doubts and drifts, twice. Each leaves its transformer in `work`, and is skipped when that
is there.
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
    """One learning-rate cycle, from what the one before it left."""

    name: str
    policy: str | None
    """The warm-started policy whose states it reads; None: clean codes."""
    drifts: bool
    """Half of the steps read a drifted policy."""
    steps: int
    peak_rate: float
    num_examples: int
    """Whose pictures are encoded once, at least half of them with two sources."""


ROUNDS = (
    Round("image21_editor_codes", None, False, 800, 3e-3, 3000),
    Round("image21_editor_knowing", "image21_policy_knowing", False, 600, 2.5e-3, 3000),
    Round("image21_editor_doubting", "image21_policy_doubting", True, 4000, 2.5e-3, 3000),
    Round("image21_editor_settling", "image21_policy_doubting", True, 3000, 1.5e-3, 6000),
)
Say = Callable[[list[Case], list[str]], Reading]
"""What the editor reads of descriptions of such cases."""
SHARE_AT_1 = 0.8


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
    say = Codes(reader) if policy is None else partial(read, reader)
    if plan.drifts:
        drifter = Drifter(policy, load_bank(work / "image21_drift.safetensors"))
    transformer = make_transformer()
    if start is not None:
        transformer = QwenImage21Transformer2DModel.from_pretrained(start)
    exam = Exam(say, reader.image_id, vae)

    def loss_of(step: int) -> torch.Tensor:
        if drifter is not None and step % 2:
            drifter.drift(rng)
        examples = pool.some(rng, rng.choice((1, 2)), batch)
        condition = _condition(say, reader.image_id, examples, rng, step if not start else None)
        x0 = torch.stack([example.x0 for example in examples])
        return flow_loss(
            lambda xt, t: velocity(transformer, xt, t, condition), x0, SHARE_AT_1, skew=0.8
        )

    def check() -> dict[str, float]:
        if drifter is not None:
            drifter.go_home()
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
    """A `Say` of that reader."""
    pictures = [case.pictures for case in cases]
    return reader.read(pictures, [case.task.instruction for case in cases], descriptions)


class Codes:
    """A stand-in for a policy: of each token a fixed vector, to which a description's add the
    directions of the two read-outs that the policy is taught by."""

    def __init__(self, reader: PicturesReader) -> None:
        generator = torch.Generator().manual_seed(7)
        self.reader, self.said, self.where = reader, RoleReadOut(reader), QuarterReadOut(reader)
        vectors = torch.randn(len(reader.tokenizer), HIDDEN, generator=generator)
        self.of_token = 0.7 * F.normalize(vectors, dim=1)

    def __call__(self, cases: list[Case], descriptions: list[str]) -> Reading:
        instructions = [case.task.instruction for case in cases]
        numbers = [len(case.scenes) for case in cases]
        ids, mask, written = self.reader.lay_out(numbers, instructions, descriptions)
        pairs = zip(cases, descriptions, strict=True)
        quarters = [quarters_of(text, case.scenes[0]) for case, text in pairs]
        labels = (self.said.labels(ids, written), self.where.labels(written, quarters))
        hidden = self.of_token[ids]
        for read_out, label in zip((self.said, self.where), labels, strict=True):
            hidden = hidden + read_out.directions[label] * (label >= 0)[..., None]
        return Reading(hidden, ids, mask, written)


class Example(NamedTuple):
    """An edit with its pictures' latents."""

    case: Case
    description: str
    """Of what was done, most of them not what the instruction asks for."""
    sources: torch.Tensor
    """[K, 16, C]"""
    x0: torch.Tensor
    """[16, C]"""


class _Pool:
    """Examples whose pictures were encoded once; the policy reads them anew each time."""

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
    say: Say, image_id: int, examples: list[Example], rng: random.Random, age: int | None
) -> Condition:
    """Of a newborn editor (`age`: its steps so far) more and more see the prompt too; at first all
    see the description only."""
    reading = say([e.case for e in examples], [e.description for e in examples])
    condition = condition_of(image_id, reading, torch.stack([e.sources for e in examples]))
    blur = 0.1 * rng.random() * (1 if age is None else min(1, age / 400))
    states = condition.states + blur * reading.hidden.std() * torch.randn_like(condition.states)
    seen = condition.seen.clone()
    for row in range(len(examples)):
        if age is not None and rng.random() >= (age - 150) / 150:
            seen[row] &= reading.written[row]
    return Condition(states, seen, condition.lengths, condition.is_image, condition.sources)


def condition_of(image_id: int, reading: Reading, sources: torch.Tensor) -> Condition:
    """Of rows that all show equally many pictures."""
    is_image = (reading.token_ids == image_id)[0]
    return Condition(reading.hidden, reading.mask, reading.mask.sum(1), is_image, sources)


class Exam:
    """Held-out cases with one picture and with two, rendered from given descriptions and graded."""

    def __init__(self, say: Say, image_id: int, vae, num: int = 64, seed: int = 9) -> None:
        rng = random.Random(seed)
        self.say, self.image_id, self.vae = say, image_id, vae
        cases = [make_case(rng) for _ in range(num)]
        self.halves = [[case for case in cases if len(case.scenes) == n] for n in (1, 2)]
        self.wrong = {id(case): _another(rng, case) for case in cases}

    @torch.no_grad()
    def marks(self, transformer) -> dict[str, float]:
        """Mean mark, 0-10, when fed right descriptions (2 and 4 steps; with one picture and with
        two) and wrong ones (2 steps)."""
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
        condition = condition_of(self.image_id, self.say(cases, descriptions), sources)
        return render(transformer, self.vae, condition, noise, steps)

    def grade(
        self, transformer, cases: list[Case], steps: int, other: dict[int, str] | None = None
    ) -> list[float]:
        """VIEScore's overall mark of each; of right descriptions, or of `other` ones by case."""
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
