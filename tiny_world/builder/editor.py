"""Stage editor: teach the diffusion transformer to do what the policy's hidden states say.

Flow matching in latents, x_t = (1 - t) x_0 + t noise, velocity = noise - x_0. At least half of
the batch is trained at t = 1: with the real scheduler (its last sigma is stretched to 0.02) and
two Euler steps, that is where the picture is made.

Descriptions are sampled at random, most of them not what the instruction asked for: the editor
must obey what was written. One in twelve names a shape that is not there: nothing may change.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from transformers import AutoTokenizer

from tiny_world.builder.drift import Drifter, load_bank, load_policy
from tiny_world.builder.exam import Exam
from tiny_world.builder.models import (
    IMG_SHAPES,
    encode,
    make_transformer,
    use_2d_convolutions,
)
from tiny_world.builder.policy import beginner_ops, random_op
from tiny_world.builder.reader import Reader
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


@dataclass(frozen=True)
class Round:
    """One learning-rate cycle. Each starts from what the one before it left."""

    steps: int
    peak_rate: float
    share_at_1: float
    """Of the examples trained at t = 1, 0..1."""


ROUNDS = (Round(3000, 2.5e-3, share_at_1=0.5), Round(3000, 1.5e-3, share_at_1=0.65))
DRIFT_FROM_STEP = 750


def build(work: Path, first: int = 0, batch: int = 24) -> None:
    """Run the rounds from number `first` on."""
    for number in range(first, len(ROUNDS)):
        _train(work, number, batch)


def _train(work: Path, number: int, batch: int) -> None:
    plan, rng = ROUNDS[number], random.Random(300 + number)
    torch.manual_seed(1 + number)
    use_2d_convolutions()
    vae = AutoencoderKLQwenImage.from_pretrained(work / "vae").eval().requires_grad_(False)
    policy = load_policy(work / "policy_doubting")  # see drift.py
    reader = Reader(policy, AutoTokenizer.from_pretrained(work / "policy"))
    drifter = Drifter(policy, load_bank(work))
    exam = Exam(reader, vae)
    transformer = _start(work, number, reader, rng).train()
    optimizer = torch.optim.AdamW(
        transformer.parameters(), plan.peak_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: _rate(i, plan.steps))
    total, steps_before = 0.0, sum(earlier.steps for earlier in ROUNDS[:number])
    for step in range(1, plan.steps + 1):
        if steps_before + step > DRIFT_FROM_STEP and step % 2:
            drifter.drift(rng)
        scenes = [make_scene(rng) for _ in range(batch)]
        x0, source, embeds, mask = _examples(reader, vae, scenes, rng, steps_before + step)
        loss = _flow_loss(transformer, x0, source, embeds, mask, plan.share_at_1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        total += loss.item()
        if step % 50 == 0:
            print(f"editor {number}: {step} loss {total / 50:.4f}", flush=True)
            total = 0.0
        if step % 400 == 0 or step == plan.steps:
            drifter.go_home()
            transformer.save_pretrained(work / "transformer")
            print(f"editor {number}: {step} {exam.marks(transformer.eval())}", flush=True)
            transformer.train()


def _start(work: Path, number: int, reader: Reader, rng: random.Random):
    if number > 0:
        return QwenImageTransformer2DModel.from_pretrained(work / "transformer")
    transformer = make_transformer()
    whiten_text_input(transformer, reader, rng)
    return transformer


def _rate(step: int, steps: int) -> float:
    """Warm-up, constant for a quarter, then a cosine to one percent."""
    progress = max(0.0, (step / steps - 0.25) / 0.75)
    return min(1, (step + 1) / 50) * (0.505 + 0.495 * math.cos(math.pi * min(1.0, progress)))


@torch.no_grad()
def _examples(reader: Reader, vae, scenes: list[Scene], rng: random.Random, age: int):
    """Random edits as (x_0 [B, N, 4 C], source [B, N, 4 C], embeds [B, L, HIDDEN], mask [B, L])."""
    tasks = [make_instruction(rng, scene) for scene in scenes]
    texts, targets = zip(
        *(_edit(rng, s, t) for s, t in zip(scenes, tasks, strict=True)), strict=True
    )
    pictures = [draw_array(scene) for scene in scenes]
    reading = reader.read(pictures, [task.instruction for task in tasks], texts)
    # at first the editor sees only the description, then more and more of the prompt too
    seen = reading.mask.clone()
    for i in range(len(scenes)):
        if rng.random() >= (age - 250) / 200:
            seen[i] &= reading.written[i]
    jitter = 0.1 * rng.random() * min(1, age / 600) * reading.hidden.std()
    embeds = reading.hidden + jitter * torch.randn_like(reading.hidden)
    latents = encode(vae, pictures + [draw_array(target) for target in targets])
    source, x0 = latents.chunk(2)
    return x0, source, embeds, seen


def _edit(rng: random.Random, scene: Scene, task: Task) -> tuple[str, Scene]:
    """A description and the scene it leads to."""
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


def _flow_loss(transformer, x0, source, embeds, mask, share_at_1: float) -> torch.Tensor:
    """Squared velocity error, weighted (t + 0.05)^2: at small t it is mostly noise."""
    num = len(x0)
    u = torch.rand(num)
    t = torch.where(torch.rand(num) < share_at_1, torch.ones(num), 1.8 * u / (1 + 0.8 * u))
    noise = torch.randn_like(x0)
    xt = x0 + t[:, None, None] * (noise - x0)
    velocity = transformer(
        hidden_states=torch.cat([xt, source], 1),
        timestep=t,
        encoder_hidden_states=embeds,
        encoder_hidden_states_mask=mask,
        img_shapes=[IMG_SHAPES] * num,
        return_dict=False,
    )[0][:, : x0.shape[1]]
    return ((velocity - (noise - x0)) * (t[:, None, None] + 0.05)).square().mean()


@torch.no_grad()
def whiten_text_input(transformer, reader: Reader, rng: random.Random, num: int = 512) -> None:
    """Start `txt_in` where the description's states have unit variance in every direction."""
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
