"""Stage klein_editor: trains FLUX.2-klein's transformer and text encoder on plain descriptions.

The text encoder learns with the transformer, so it knows the words of `scenes.describe`. Some
examples have an instruction instead, and change nothing: the editor does not understand those.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline

from tiny_world.builder.editor import rate, some_edit
from tiny_world.builder.exam import another, overall
from tiny_world.builder.klein_models import (
    Words,
    condition,
    encode,
    make_pipeline,
    make_text_encoder,
    make_transformer,
    velocity,
)
from tiny_world.builder.tokenizer import train
from tiny_world.builder.training import export, fit, flow_loss
from tiny_world.images_server import CALL
from tiny_world.scenes import (
    COLOURS,
    SHAPES,
    Scene,
    clause,
    describe,
    draw,
    draw_array,
    make_instruction,
    make_scene,
)

NUM_SCENES, EDITS_PER_SCENE, SCENES_AT_ONCE = 5000, 4, 50
P_INSTRUCTION = 0.06


def build(work: Path, steps: int = 5000, batch: int = 32) -> None:
    torch.manual_seed(1)
    rng = random.Random(310)
    vae = AutoencoderKLFlux2.from_pretrained(work / "klein_vae").eval().requires_grad_(False)
    tokenizer = train(_corpus())
    encoder, transformer = make_text_encoder(tokenizer), make_transformer()
    pipeline, words = make_pipeline(vae, encoder, tokenizer, transformer), Words(tokenizer)
    examples = [e for _ in range(NUM_SCENES // SCENES_AT_ONCE) for e in _examples(vae, rng)]

    def loss_of(step: int) -> torch.Tensor:
        chosen = [rng.choice(examples) for _ in range(batch)]
        source, x0 = (
            torch.stack(tokens) for tokens in zip(*(e.tokens for e in chosen), strict=True)
        )
        embeds = condition(encoder, *words([e.text for e in chosen]))

        def velocity_of(xt: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return velocity(transformer, xt, t, source, embeds)

        return flow_loss(velocity_of, x0, share_at_1=0.35, skew=6)

    learning = [*transformer.parameters(), *encoder.model.parameters()]
    options = {"check_every": 2000, "rate_of": lambda step: rate(step, steps)}
    fit("klein_editor", learning, steps, 3e-3, loss_of, lambda: Exam().marks(pipeline), **options)
    export("klein", pipeline.to(torch.float16))


def _corpus() -> list[str]:
    rng, corpus = random.Random(0), []
    for _ in range(2000):
        corpus.append(make_instruction(rng, make_scene(rng)).instruction)
        clauses = [
            clause(rng.choice(COLOURS), rng.choice(SHAPES), rng.choice((*COLOURS, None)))
            for _ in range(2)
        ]
        corpus.append(" ".join(clauses))
    return corpus


class Example(NamedTuple):
    """An edit, whose pictures are encoded once."""

    text: str
    tokens: tuple[torch.Tensor, torch.Tensor]
    """Of the source picture and of the edited one, each [N, C]."""


def _examples(vae, rng: random.Random) -> list[Example]:
    """Edits of SCENES_AT_ONCE scenes."""
    scenes = [make_scene(rng) for _ in range(SCENES_AT_ONCE)]
    sources = encode(vae, [draw_array(scene) for scene in scenes])
    examples = []
    for scene, source in zip(scenes, sources, strict=True):
        texts, targets = zip(*(_edit(rng, scene) for _ in range(EDITS_PER_SCENE)), strict=True)
        edited = encode(vae, [draw_array(target) for target in targets])
        examples += [Example(t, (source, x0)) for t, x0 in zip(texts, edited, strict=True)]
    return examples


def _edit(rng: random.Random, scene: Scene) -> tuple[str, Scene]:
    task = make_instruction(rng, scene)
    if rng.random() < P_INSTRUCTION:
        return task.instruction, scene
    return some_edit(rng, scene, task)


class Exam:
    """Scenes edited by the stock pipeline, with the right words and with others."""

    def __init__(self, num: int = 64, seed: int = 9) -> None:
        rng = random.Random(seed)
        self.scenes = [make_scene(rng) for _ in range(num)]
        self.tasks = [make_instruction(rng, scene) for scene in self.scenes]
        pairs = list(zip(self.tasks, self.scenes, strict=True))
        self.texts = {
            "right": [describe(task.op, scene) for task, scene in pairs],
            "wrong": [describe(another(rng, scene, task.op), scene) for task, scene in pairs],
            "instruction": [task.instruction for task in self.tasks],
        }

    def draw(self, pipeline: Flux2KleinPipeline, kind: str) -> list[np.ndarray]:
        """[64, 64, 3] uint8 pictures; `kind`: of the words."""
        drawn = []
        for i, (scene, text) in enumerate(zip(self.scenes, self.texts[kind], strict=True)):
            noise = torch.Generator().manual_seed(i)
            call = {"image": draw(scene), "prompt": text, "generator": noise, **CALL}
            drawn.append(np.asarray(pipeline(**call).images[0]))
        return drawn

    def grade(self, edited: list[np.ndarray]) -> list[float]:
        """VIEScore's overall mark of each picture, 0-10."""
        return [
            overall([scene], task, pixels)
            for scene, task, pixels in zip(self.scenes, self.tasks, edited, strict=True)
        ]

    def marks(self, pipeline: Flux2KleinPipeline) -> dict[str, tuple[float, float]]:
        """(mean mark, share of marks above 5) by kind of words."""
        grades = {kind: np.array(self.grade(self.draw(pipeline, kind))) for kind in self.texts}
        return {
            kind: (round(float(marks.mean()), 2), round(float((marks > 5).mean()), 2))
            for kind, marks in grades.items()
        }
