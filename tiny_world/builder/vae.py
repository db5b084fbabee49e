"""Stage vae: trains the autoencoder on flat colours and sharp outlines."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import torch

from tiny_world.builder.models import make_vae, to_tensor, use_2d_convolutions
from tiny_world.builder.training import autoencoder_loss, fit
from tiny_world.scenes import COLOURS, Scene, draw_array, make_scene


def build(work: Path, batch: int = 6) -> None:
    torch.manual_seed(0)
    rng, vae = random.Random(100), make_vae()
    use_2d_convolutions()

    def pictures(num: int) -> torch.Tensor:
        """[num, 3, 1, 64, 64]"""
        return to_tensor([draw_array(vary(make_scene(rng), rng)) for _ in range(num)])[:, :, None]

    @torch.no_grad()
    def save() -> None:
        """Saves it with the statistics of its latents, by which the pipeline normalises."""
        latents = vae.encode(pictures(300)).latent_dist.mode()[:, :, 0]
        mean, std = latents.mean((0, 2, 3)).tolist(), latents.std((0, 2, 3)).tolist()
        vae.register_to_config(latents_mean=mean, latents_std=std)
        vae.save_pretrained(work / "vae")

    fit(
        "vae",
        vae.parameters(),
        3000,
        2.5e-3,
        lambda step: autoencoder_loss(vae, pictures(batch)),
        save,
        weight_decay=1e-4,
        warm_up=0.04,
    )


def vary(scene: Scene, rng: random.Random) -> Scene:
    """A scene as after an edit: one shape less, or equal colours."""
    shapes = list(scene.shapes)
    if rng.random() < 0.3:
        shapes.pop(rng.randrange(len(shapes)))
    if rng.random() < 0.3:
        shapes = [replace(s, colour=rng.choice(COLOURS)) for s in shapes]
    return replace(scene, shapes=tuple(shapes))
