"""Stage editor: trains the diffusion transformer to follow the policy's hidden states."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import NamedTuple

import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler
from transformers import AutoTokenizer

from tiny_world.builder.drift import Drifter, load_bank
from tiny_world.builder.exam import Exam
from tiny_world.builder.models import (
    SCHEDULER,
    encode,
    load_policy,
    make_transformer,
    use_2d_convolutions,
    velocity,
)
from tiny_world.builder.policy import beginner_ops, random_op
from tiny_world.builder.reader import Reader
from tiny_world.builder.training import WEIGHTS, export, fit, flow_loss
from tiny_world.scenes import (
    COLOURS,
    SHAPES,
    Scene,
    Task,
    apply,
    clause,
    describe,
    draw_array,
    make_instruction,
    make_scene,
)


class Round(NamedTuple):
    """One learning-rate cycle, which continues from the round before it."""

    steps: int
    peak_rate: float
    share_at_1: float
    """Share of the examples trained at t = 1, 0..1. It is large, as two Euler steps of the real
    scheduler (whose last sigma is 0.02) make the picture mostly at t = 1."""


ROUNDS = (Round(3000, 2.5e-3, share_at_1=0.5), Round(3000, 1.5e-3, share_at_1=0.65))
DRIFT_FROM_STEP = 750


def build(work: Path, batch: int = 24) -> None:
    use_2d_convolutions()
    vae = AutoencoderKLQwenImage.from_pretrained(work / "vae").eval().requires_grad_(False)
    policy = load_policy(work / "policy_doubting")
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS / "policy")  # nosec B615 # local
    reader = Reader(policy, tokenizer)
    drifter, exam = Drifter(policy, load_bank(work / "drift.safetensors")), Exam(reader, vae)
    torch.manual_seed(1)
    rng = random.Random(300)
    transformer = make_transformer()
    whiten_text_input(transformer, reader, rng)

    def train(plan: Round, rng: random.Random, steps_before: int) -> None:
        def loss_of(step: int) -> torch.Tensor:
            if steps_before + step > DRIFT_FROM_STEP and step % 2:
                drifter.drift(rng)
            scenes = [make_scene(rng) for _ in range(batch)]
            x0, source, embeds, mask = _examples(reader, vae, scenes, rng, steps_before + step)

            def velocity_of(xt: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
                return velocity(transformer, xt, t, source, embeds, mask)

            return flow_loss(velocity_of, x0, plan.share_at_1, skew=0.8)

        def check() -> dict[str, float]:
            drifter.restore()
            return exam.marks(transformer)

        options = {"check_every": 400, "rate_of": lambda step: rate(step, plan.steps)}
        fit(
            "editor",
            transformer.parameters(),
            plan.steps,
            plan.peak_rate,
            loss_of,
            check,
            **options,
        )

    first, second = ROUNDS
    train(first, rng, 0)
    torch.manual_seed(2)
    train(second, random.Random(301), first.steps)
    export("editor/vae", vae)
    export("editor/transformer", transformer)
    export("editor/scheduler", FlowMatchEulerDiscreteScheduler(**SCHEDULER))


def rate(step: int, steps: int) -> float:
    """Warm-up, constant for a quarter, then a cosine to one percent."""
    progress = max(0.0, (step / steps - 0.25) / 0.75)
    return min(1, (step + 1) / 50) * (0.505 + 0.495 * math.cos(math.pi * min(1.0, progress)))


@torch.no_grad()
def _examples(reader: Reader, vae, scenes: list[Scene], rng: random.Random, age: int):
    """Random edits as (x_0 [B, N, 4 C], source [B, N, 4 C], embeds [B, L, HIDDEN], mask [B, L]);
    `age`: training steps so far."""
    tasks = [make_instruction(rng, scene) for scene in scenes]
    texts, targets = zip(
        *(some_edit(rng, s, t) for s, t in zip(scenes, tasks, strict=True)), strict=True
    )
    pictures = [draw_array(scene) for scene in scenes]
    reading = reader.read(pictures, [task.instruction for task in tasks], texts)
    # At first the editor sees only the description; later more and more examples show the prompt.
    visible = reading.mask.clone()
    for i in range(len(scenes)):
        if rng.random() >= (age - 250) / 200:
            visible[i] &= reading.written[i]
    jitter = 0.1 * rng.random() * min(1, age / 600) * reading.hidden.std()
    embeds = reading.hidden + jitter * torch.randn_like(reading.hidden)
    latents = encode(vae, pictures + [draw_array(target) for target in targets])
    source, x0 = latents.chunk(2)
    return x0, source, embeds, visible


def some_edit(rng: random.Random, scene: Scene, task: Task) -> tuple[str, Scene]:
    """A random description and its result. Most are not what the instruction asks for, as the
    editor must follow the description; one in twelve names an absent shape and changes nothing."""
    if rng.random() < 1 / 12:
        return _description_of_nothing(rng, scene), scene
    if rng.random() < 0.4:
        ops = beginner_ops(rng, scene, task, settled=False)
    else:
        ops = [random_op(rng, scene) for _ in range(rng.choice((1, 1, 1, 2)))]
        ops = ops if len({op.shape for op in ops}) == len(ops) else ops[:1]
    target = scene
    for op in ops:
        target = apply(target, op)
    return describe(ops, scene), target


def _description_of_nothing(rng: random.Random, scene: Scene) -> str:
    while True:
        colour, shape = rng.choice(COLOURS), rng.choice(SHAPES)
        if all((s.colour, s.shape) != (colour, shape) for s in scene.shapes):
            return clause(colour, shape, rng.choice((*COLOURS, None)))


@torch.no_grad()
def whiten_text_input(transformer, reader: Reader, rng: random.Random, num: int = 512) -> None:
    """Initialises `txt_in` so that description states have unit variance in all directions."""
    scenes = [make_scene(rng) for _ in range(num)]
    instructions = [make_instruction(rng, scene).instruction for scene in scenes]
    texts = [describe(random_op(rng, scene), scene) for scene in scenes]
    reading = reader.read([draw_array(s) for s in scenes], instructions, texts)
    states = reading.hidden[reading.written]
    states = states / states.square().mean(1, keepdim=True).sqrt()
    mean = states.mean(0)
    values, vectors = torch.linalg.eigh((states - mean).T @ (states - mean) / len(states))
    whitening = (vectors * (values + 0.05 * values.mean()).rsqrt()) @ vectors.T
    transformer.txt_in.weight.copy_(whitening)
    transformer.txt_in.bias.copy_(-whitening @ mean)
