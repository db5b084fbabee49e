"""Stage sd3_vae: trains an AutoencoderKL on flat colours and sharp outlines."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from tiny_world.builder.models import to_tensor
from tiny_world.builder.prompt_models import make_vae, random_picture
from tiny_world.builder.training import autoencoder_loss, fit
from tiny_world.captions import all_wishes

ROUNDS = ((2500, 2.5e-3), (3000, 2e-3))
"""(steps, peak learning rate) of each cycle, which continues from the cycle before it."""


def build(work: Path, batch: int = 8) -> None:
    vae, wishes = None, all_wishes()
    for number, (steps, peak_rate) in enumerate(ROUNDS):
        torch.manual_seed(number)
        rng, vae = random.Random(400 + number), vae or make_vae()
        _train(vae, steps, peak_rate, rng, wishes, batch, work / "sd3_vae")


def _train(vae, steps: int, peak_rate: float, rng, wishes, batch: int, folder: Path) -> None:
    def loss_of(step: int) -> torch.Tensor:
        pictures = [random_picture(rng, rng.choice(wishes)) for _ in range(batch)]
        return autoencoder_loss(vae, to_tensor(pictures))

    @torch.no_grad()
    def save() -> None:
        """Saves it with the mean and scale of its latents, by which the pipeline normalises."""
        pictures = [random_picture(rng, wish) for wish in wishes]
        latents = vae.encode(to_tensor(pictures)).latent_dist.mode()
        shift, scale = latents.mean().item(), 1 / latents.std().item()
        vae.register_to_config(shift_factor=shift, scaling_factor=scale)
        vae.save_pretrained(folder)

    options = {"weight_decay": 1e-4, "warm_up": 0.04}
    fit("sd3_vae", vae.parameters(), steps, peak_rate, loss_of, save, **options)
