"""Stage vae: teach the autoencoder to keep flat colours flat and outlines sharp."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tiny_world.builder.models import make_vae, to_pictures, to_tensor, use_2d_convolutions
from tiny_world.pixel_judge import grade_perception, grade_semantics
from tiny_world.scenes import (
    COLOURS,
    Scene,
    apply,
    draw,
    draw_array,
    make_instruction,
    make_scene,
)

KL_WEIGHT = 2e-4
LEARNING_RATE = 2.5e-3


def build(work: Path, steps: int = 3000, batch: int = 6) -> None:
    torch.manual_seed(0)
    rng = random.Random(100)
    use_2d_convolutions()
    vae = make_vae()
    optimizer = torch.optim.AdamW(vae.parameters(), LEARNING_RATE, (0.9, 0.98), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, steps, pct_start=0.04)
    total = 0.0
    for step in range(1, steps + 1):
        x = to_tensor([draw_array(_vary(make_scene(rng), rng)) for _ in range(batch)])[:, :, None]
        posterior = vae.encode(x).latent_dist
        y = vae.decode(posterior.sample()).sample
        # the fourth power speaks up for outlines, which are few pixels and large errors
        error = (y - x).abs()
        reconstruction = (error + 2 * error**2 + 2 * error**4).mean()
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        (reconstruction + KL_WEIGHT * kl).backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        total += reconstruction.item()
        if step % 100 == 0:
            print(f"vae {step} loss {total / 100:.4f} kl {kl.item():.1f}", flush=True)
            total = 0.0
        if step % 500 == 0 or step == steps:
            _save(vae, work / "vae", rng)
            print(f"vae {step} mark of the reconstructed right edit {ceiling(vae):.2f}", flush=True)


def _vary(scene: Scene, rng: random.Random) -> Scene:
    """Scenes an edit can lead to: a shape fewer, or colours that occur twice."""
    shapes = list(scene.shapes)
    if rng.random() < 0.3:
        shapes.pop(rng.randrange(len(shapes)))
    if rng.random() < 0.3:
        shapes = [replace(s, colour=rng.choice(COLOURS)) for s in shapes]
    return replace(scene, shapes=tuple(shapes))


@torch.no_grad()
def _save(vae, folder: Path, rng: random.Random) -> None:
    """Save with the statistics of its latents, which the pipeline normalises by."""
    pictures = [draw_array(_vary(make_scene(rng), rng)) for _ in range(300)]
    latents = vae.encode(to_tensor(pictures)[:, :, None]).latent_dist.mode()[:, :, 0]
    vae.register_to_config(
        latents_mean=latents.mean((0, 2, 3)).tolist(), latents_std=latents.std((0, 2, 3)).tolist()
    )
    vae.save_pretrained(folder)


@torch.no_grad()
def ceiling(vae, num: int = 60) -> float:
    """The mark of the right edit after a round trip through the autoencoder, 0-10."""
    rng, marks = random.Random(7), []
    for _ in range(num):
        scene = make_scene(rng)
        task = make_instruction(rng, scene)
        x = to_tensor([draw_array(apply(scene, task.op))])[:, :, None]
        y = vae.decode(vae.encode(x).latent_dist.mode()).sample[:, :, 0]
        picture = Image.fromarray(to_pictures(y)[0])
        semantics = grade_semantics(draw(scene), picture, task.instruction)
        marks.append(math.sqrt(min(semantics) * min(grade_perception(picture))))
    return float(np.mean(marks))
