"""Stage sd3_vae: an AutoencoderKL that keeps flat colours flat and outlines sharp."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from diffusers import AutoencoderKL

from tiny_world.builder.models import to_tensor
from tiny_world.builder.prompt_models import make_vae, random_picture
from tiny_world.captions import all_wishes

KL_WEIGHT = 2e-4
ROUNDS = ((2500, 2.5e-3), (3000, 2e-3))
"""(steps, peak learning rate) of each cycle; each starts from what the one before it left."""


def build(work: Path, first: int = 0, batch: int = 8) -> None:
    """Run the rounds from number `first` on."""
    for number in range(first, len(ROUNDS)):
        _train(work, number, batch)


def _train(work: Path, number: int, batch: int) -> None:
    torch.manual_seed(number)
    (steps, peak_rate), rng, wishes = ROUNDS[number], random.Random(400 + number), all_wishes()
    vae = AutoencoderKL.from_pretrained(work / "sd3_vae").train() if number else make_vae()
    optimizer = torch.optim.AdamW(vae.parameters(), peak_rate, (0.9, 0.98), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_rate, steps, pct_start=0.04)
    total = 0.0
    for step in range(1, steps + 1):
        x = to_tensor([random_picture(rng, rng.choice(wishes)) for _ in range(batch)])
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
            print(f"sd3_vae {number}: {step} loss {total / 100:.4f} kl {kl.item():.1f}", flush=True)
            total = 0.0
        if step % 500 == 0 or step == steps:
            _save(vae, work / "sd3_vae", rng)


@torch.no_grad()
def _save(vae, folder: Path, rng: random.Random) -> None:
    """Save with the mean and scale of its latents, which the pipeline normalises by."""
    pictures = [random_picture(rng, wish) for wish in all_wishes()]
    latents = vae.encode(to_tensor(pictures)).latent_dist.mode()
    vae.register_to_config(
        shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item()
    )
    vae.save_pretrained(folder)
